"""Where the fields of `ForwardArguments` lie in 8-byte words, and how those that lengths decide are written."""

from __future__ import annotations

import struct
from functools import partial

from flashwright.kernels.forward.launch import ForwardArguments
from flashwright.runtime.parameters import word_of

forward_word = partial(word_of, ForwardArguments)
Q_WORD, K_WORD, V_WORD, O_WORD = (forward_word(name) for name in "QKVO")
LSE_BATCH_STRIDE_WORD, LSE_HEAD_STRIDE_WORD = forward_word("lse_batch_stride"), forward_word("lse_head_stride")
LENGTHS_WORD, HEADS_WORD, BLOCKS_WORD = forward_word("q_length"), forward_word("q_heads"), forward_word("q_blocks")
write_output_and_sizes = struct.Struct("=3q8x2q16x6i").pack_into
"""The fields from the output's strides on: those, the log-sum-exp's address (0) and strides, starts (0), lengths,
heads, heads for each of k's, blocks and batches. They are all that lengths decide, tensor maps apart."""
