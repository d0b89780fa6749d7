// Kernels of FlashAttention-2 (flash-attn 2.8.3) for head dimension 64, bf16, causal, behind a few plain arguments.
#include "namespace_config.h"
#include "flash.h"
#include "flash_fwd_kernel.h"
#include "flash_bwd_preprocess_kernel.h"
#include "flash_bwd_kernel.h"
using namespace flash;
using ForwardTraits = Flash_fwd_kernel_traits<64, 64, 64, 4, false, false, cutlass::bfloat16_t>;
using BackwardTraits = Flash_bwd_kernel_traits<64, 64, 128, 8, 2, 4, 4, true, false, cutlass::bfloat16_t>;

// q, o, dout, dq: [batch, q length, heads, 64]; k, v, dk, dv: [batch, k length, heads (forward: kv heads), 64];
// lse, dsum: [batch, heads, q length]; dq_accum: [batch, q length, heads, 64] of float.
struct Arguments {
  void *q, *k, *v, *o, *dout, *dq, *dk, *dv;
  float *lse, *dsum, *dq_accum;
  int batch, heads, kv_heads, q_length, k_length;
  float scale;
};

__device__ __forceinline__ Flash_bwd_params parameters(const Arguments &a) {
  Flash_bwd_params p{};
  p.q_ptr = a.q, p.k_ptr = a.k, p.v_ptr = a.v, p.o_ptr = a.o, p.softmax_lse_ptr = a.lse;
  p.do_ptr = a.dout, p.dq_ptr = a.dq, p.dk_ptr = a.dk, p.dv_ptr = a.dv;
  p.dsoftmax_sum = a.dsum, p.dq_accum_ptr = a.dq_accum;
  const int64_t row = a.heads * 64, kv_row = a.kv_heads * 64;
  p.q_row_stride = p.o_row_stride = p.do_row_stride = p.dq_row_stride = row;
  p.k_row_stride = p.v_row_stride = p.dk_row_stride = p.dv_row_stride = kv_row;
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = 64;
  p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = 64;
  p.q_batch_stride = p.o_batch_stride = p.do_batch_stride = p.dq_batch_stride = a.q_length * row;
  p.k_batch_stride = p.v_batch_stride = p.dk_batch_stride = p.dv_batch_stride = a.k_length * kv_row;
  p.h = a.heads, p.h_k = a.kv_heads, p.h_h_k_ratio = a.heads / a.kv_heads;
  p.b = a.batch, p.seqlen_q = a.q_length, p.seqlen_k = a.k_length, p.d = p.d_rounded = 64;
  p.seqlen_q_rounded = (a.q_length + 127) / 128 * 128, p.seqlen_k_rounded = (a.k_length + 127) / 128 * 128;
  p.scale_softmax = p.scale_softmax_rp_dropout = a.scale, p.scale_softmax_log2 = a.scale * 1.4426950408889634f;
  p.window_size_left = -1, p.window_size_right = 0;
  p.is_bf16 = p.is_causal = true, p.rp_dropout = p.p_dropout = 1.f;
  return p;
}

extern "C" __global__ void __launch_bounds__(128) fa2_forward(const __grid_constant__ Arguments a) {
  const Flash_bwd_params p = parameters(a);
  compute_attn<ForwardTraits, false, true, false, false, false, true, false, false>(p);
}
extern "C" __global__ void fa2_dot(const __grid_constant__ Arguments a) {
  const Flash_bwd_params p = parameters(a);
  compute_dot_do_o<true, BackwardTraits>(p);
}
extern "C" __global__ void __launch_bounds__(256) fa2_backward(const __grid_constant__ Arguments a) {
  const Flash_bwd_params p = parameters(a);
  compute_dq_dk_dv_seqk_parallel<BackwardTraits, false, true, false, false, false, true, false>(p);
}
extern "C" __global__ void fa2_convert(const __grid_constant__ Arguments a) {
  const Flash_bwd_params p = parameters(a);
  convert_dQ<BackwardTraits>(p, 1);
}
