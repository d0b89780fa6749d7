// Before decoding: new keys and values are written into the cache behind those it holds, and rotary embeddings are applied
// to the new keys and to the queries.
//
// The grid is (vectors of a job, jobs, sequences). A thread has vectors of 8 columns of one row.
#pragma once
#include "attention/decode_arguments.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

// Rows of one tensor that go to another, rotated or not.
struct AppendJob {
    TensorView source, target;
    int heads, rows; // of the source, of each sequence
    int rotates, into_cache;
    int advances; // positions grow from row to row; otherwise all rows have the first one's
    int columns;
};

struct AppendArguments {
    DecodeArguments decode; // whose keys and lengths are those before anything is appended
    AppendJob jobs[3];
    const char *cosines, *sines; // (positions, columns / 2) of the tensors' dtype; null: nothing is rotated
    int rotary_columns, rotary_positions, interleaved;
};

constexpr int append_threads = 128;

DEVICE Pair rotated(Pair x, float cosine, float sine) {
    return {x.values[0] * cosine - x.values[1] * sine, x.values[1] * cosine + x.values[0] * sine};
}

// A vector of a row, rotated for a position. Columns from `rotary_columns` on stay as they are.
DEVICE Vector16B rotated_vector(const AppendArguments &args, const char *row, int vector, int position) {
    const Vector16B own = load_global_16B(row + vector * vector_bytes);
    const int column = vector * vector_elements, half = args.rotary_columns / 2;
    if (column >= args.rotary_columns)
        return own;
    const int64 table_row = (int64)clamp(position, 0, args.rotary_positions - 1) * half * element_bytes;
    Vector16B result;
    if (args.interleaved) { // columns 2i and 2i + 1 are a pair
        const char *cosines = args.cosines + table_row + column / 2 * element_bytes;
        const char *sines = args.sines + table_row + column / 2 * element_bytes;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const Pair cosine = unpack_16bit<cfg::dtype>(*(const uint32 *)(cosines + i * element_bytes));
            const Pair sine = unpack_16bit<cfg::dtype>(*(const uint32 *)(sines + i * element_bytes));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const Pair y = rotated(unpack_16bit<cfg::dtype>(own.words[i + j]), cosine.values[j], sine.values[j]);
                result.words[i + j] = pack_16bit<cfg::dtype>(y.values[0], y.values[1]);
            }
        }
        return result;
    }
    // Columns i and i + half are a pair.
    const bool upper = column >= half;
    const int place = upper ? column - half : column;
    const Vector16B other = load_global_16B(row + (upper ? place : column + half) * element_bytes);
    const Vector16B cosines = load_global_16B(args.cosines + table_row + place * element_bytes);
    const Vector16B sines = load_global_16B(args.sines + table_row + place * element_bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Pair x = unpack_16bit<cfg::dtype>(own.words[i]), y = unpack_16bit<cfg::dtype>(other.words[i]);
        const Pair cosine = unpack_16bit<cfg::dtype>(cosines.words[i]), sine = unpack_16bit<cfg::dtype>(sines.words[i]);
        float values[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const Pair pair = upper ? Pair{y.values[j], x.values[j]} : Pair{x.values[j], y.values[j]};
            values[j] = rotated(pair, cosine.values[j], sine.values[j]).values[upper];
        }
        result.words[i] = pack_16bit<cfg::dtype>(values[0], values[1]);
    }
    return result;
}

template <int> __global__ void __launch_bounds__(append_threads)
    decode_append_kernel(const __grid_constant__ AppendArguments args) {
    const AppendJob &job = args.jobs[blockIdx.y];
    // Known where all tensors have as many: divisions by it are cheap then.
    constexpr int columns = variant::pads_columns ? variant::head_dim : cfg::d_head;
    const int vectors = (variant::value_head_dim ? job.columns : columns) / vector_elements;
    const int batch = blockIdx.z;
    const int held = args.decode.kv_lengths ? args.decode.kv_lengths[batch] : 0;
    const CachedSequence sequence(args.decode, batch);
    const int total = job.rows * job.heads * vectors;
    for (int i = blockIdx.x * append_threads + threadIdx.x; i < total; i += gridDim.x * append_threads) {
        const int vector = i % vectors, head = i / vectors % job.heads, row = i / vectors / job.heads;
        const int position = held + (job.advances ? row : 0);
        const char *source = head_start(job.source, batch, head) + row * job.source.row_stride * element_bytes;
        char *target;
        if (job.into_cache) {
            const bool fits = 0 <= position && position < args.decode.forward.kv_length;
            const int place = fits ? sequence.place_of(args.decode, position) : -1;
            if (place < 0)
                continue; // nothing is written outside of the cache, or into another sequence's pages
            target = const_cast<char *>(sequence.row_in(place, job.target, head, sequence.row_of(args.decode, position)));
        } else {
            target = head_start(job.target, batch, head) + row * job.target.row_stride * element_bytes;
        }
        const Vector16B v = job.rotates ? rotated_vector(args, source, vector, position)
                                        : load_global_16B(source + vector * vector_bytes);
        store_global_16B(target + vector * vector_bytes, v);
    }
}
