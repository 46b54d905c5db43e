"""Keywords of other libraries and their replacements: the table that error messages and docs/coming_from.md share."""

from __future__ import annotations

_CAUSAL = (
    'use causal=True (equal lengths), causal="top_left" (as PyTorch aligns) or causal="bottom_right" '
    "(as FlashAttention aligns)"
)
_CAUSAL_ARRAY = 'use mask=cuflash.masks.Causal("bottom_right").toarray(seqlen_q, seqlen_kv)'
_DROPOUT = "use dropout=cuflash.Dropout(p, seed=seed), or dropout=None in inference"
_WEIGHTS = (
    "leave it out: weights are never stored; on small problems the o of "
    "cuflash.reference.attention(q, k, np.eye(seqlen_kv)) holds them"
)
_CACHE = "call append(k, v) and then attention(q) of a cuflash.KVCache, which counts the tokens of each sequence"
_PAGES = "call cuflash.KVCache.over(k_pages, v_pages, block_table, lengths), and attention(q) of the cache"
_TILES = "leave it out: tiles and splits are chosen for the problem and the GPU; kernel= names a family of kernels"
_SIZES = "leave it out: sizes come from the arrays, [batch, num_heads, seqlen, head_dim]"
_AXES = (
    "leave it out: axes are [batch, num_heads, seqlen, head_dim] (BHSD); pass x.swapaxes(-3, -2) of arrays "
    "[batch, seqlen, num_heads, head_dim] (BSHD)"
)
_AXES_PACKED = "use axis=-2 for arrays [num_heads, seqlen, head_dim], axis=-3 for [seqlen, num_heads, head_dim]"
_BLOCKS = "use mask= with cuflash.BlockIndex.from_blocks(blocks, seqlen_q, seqlen_kv, block), blocks as booleans"

# Each row has names, and sentences about them. The first sentence is for cuflash.attention. Other calls use the first
# sentence whose keywords they all accept. If there is none, calls that take q use the first sentence without keywords.
_TABLE: tuple[tuple[str, *tuple[str, ...]], ...] = (
    # Operands
    ("query query_layer query_states queries", "use q="),
    ("key key_layer key_states keys", "use k="),
    ("value value_layer value_states values", "use v="),
    ("qkv", "use q=, k= and v=: three arrays [batch, num_heads, seqlen, head_dim]"),
    ("kv", "use k= and v=: two arrays [batch, num_kv_heads, seqlen, head_dim]"),
    ("grad_output grad_out dout", "call cuflash.attention_vjp, and vjp(do) of its result", "use do="),
    ("softmax_lse", "use return_lse=True", "use lse="),
    ("v_a v_b", "call cuflash.merge(outs, lses)", "use outs=[o_a, o_b]"),
    ("s_a s_b", "call cuflash.merge(outs, lses)", "use lses=[lse_a, lse_b]"),
    # Masks
    ("attn_mask", "use mask= (booleans, True attends) or bias= (numbers that are added to scores)", "use mask="),
    (
        "attention_mask",
        "use mask= (booleans, True attends; attention_mask[:, None, None, :] != 0 for shape [batch, seqlen_kv]) or "
        "bias= (numbers that are added to scores)",
        "use mask= (booleans, True attends)",
    ),
    ("custom_mask query_mask key_mask value_mask", "use mask= (booleans, True attends)"),
    (
        "key_padding_mask",
        "use mask=~key_padding_mask[:, None, None, :] (True marks padding there), or "
        "mask=cuflash.masks.Lengths(kv=lengths)",
        "use kv= for the lengths without padding",
    ),
    ("is_causal use_causal_mask causal_mask use_causal_mask_bottom_right diagonal_alignment", _CAUSAL, _CAUSAL_ARRAY),
    ("attn_mask_type mask_type", "use causal=, window= or mask=", "use mask="),
    (
        "window_size",
        "use window=(left, right), both inclusive, with None instead of -1",
        "use left= and right=, with None instead of -1",
        "use mask=cuflash.masks.SlidingWindow(left, right).toarray(seqlen_q, seqlen_kv)",
    ),
    (
        "sliding_window sliding_window_length sliding_window_size",
        "use window=(sliding_window - 1, 0): the size counts the query's own key there, and left does not",
        "use left= (the size - 1) and right=",
        "use mask=cuflash.masks.SlidingWindow(left, right).toarray(seqlen_q, seqlen_kv)",
    ),
    (
        "local_window_size",
        "use window=(left, right), both inclusive; one size w is window=(w, w)",
        "use left= and right=",
        "use mask=cuflash.masks.SlidingWindow(left, right).toarray(seqlen_q, seqlen_kv)",
    ),
    (
        "window_left window_right",
        "use window=(left, right), both inclusive, with None instead of -1",
    ),
    ("attention_chunk", "use mask=cuflash.masks.Causal() & (lambda b, h, i, j: i // size == j // size)"),
    ("mask_mod", "use mask=, a function of index arrays (b, h, i, j) that has & | ~ instead of and, or, not"),
    (
        "block_mask sparse_block_mask block_sparse_tensors",
        "use mask=, a function of index arrays (b, h, i, j), or a cuflash.BlockIndex of them that calls share",
    ),
    ("kv_num_blocks kv_indices block_layout sparsity_layout", _BLOCKS),
    (
        "cu_seqlens cu_seqlens_q cu_seq_q cu_seq_lens_q q_cu_seqlens qo_indptr",
        "use mask=cuflash.masks.Sequences(cu_seqlens_q, cu_seqlens_k), with arrays as cuflash.pack makes them",
        "use q_offsets=",
        "use offsets=",
    ),
    (
        "cu_seqlens_k cu_seqlens_kv cu_seq_k cu_seq_lens_k kv_cu_seqlens kv_indptr",
        "use mask=cuflash.masks.Sequences(cu_seqlens_q, cu_seqlens_k), with arrays as cuflash.pack makes them",
        "use kv_offsets=",
        "use offsets=",
    ),
    (
        "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv max_q max_k max_length_q max_length_k",
        "leave it out: the offsets of cuflash.masks.Sequences hold the lengths",
        "use capacity=",
    ),
    (
        "segment_ids document_ids q_segment_ids kv_segment_ids seq_idx",
        "use mask=cuflash.masks.Documents(q_ids, kv_ids)",
        "use q_ids= and kv_ids=",
    ),
    (
        "query_seq_lengths query_lengths q_lengths q_seqlen seq_len_q seqused_q",
        "use mask=cuflash.masks.Lengths(q=lengths)",
        "use q_lengths=",
    ),
    (
        "key_value_seq_lengths kv_seq_lengths kv_lengths key_lengths kv_seqlen seq_len_kv seqused_k kv_len seq_lens "
        "actual_seq_lengths nonpad_kv_seqlen context_lens",
        "use mask=cuflash.masks.Lengths(kv=lengths)",
        "use kv_lengths=",
        "use kv= for the lengths",
        "use lengths=",
    ),
    ("padding_mask use_padding_mask", "use mask=cuflash.masks.Lengths(kv=lengths)", "use kv= for the lengths"),
    ("prefix_len prefix_length prefix_lengths", "use mask=cuflash.masks.PrefixLM(prefix)", "use prefix="),
    ("alignment", 'use causal="top_left" or causal="bottom_right"', "use align="),
    # Scores
    (
        "sm_scale softmax_scale scaling scaling_factor scale_factor attn_scale logits_scale qk_scale query_scale "
        "norm_factor",
        "use scale=",
    ),
    ("score_mod", "use score=, a function of (s, b, h, i, j) in NumPy operations"),
    (
        "attn_bias",
        'use bias= (numbers that are added to scores), causal="top_left" for LowerTriangularMask, or '
        "mask=cuflash.masks.Sequences(offsets) for BlockDiagonalMask",
        "use score=cuflash.scores.bias(array)",
    ),
    (
        "position_bias relative_attention_bias core_attention_bias ab attention_bias",
        "use bias=, numbers that are added to scores",
        "use score=cuflash.scores.bias(array)",
    ),
    (
        "alibi_slopes use_alibi_mask alibi",
        "use score=cuflash.scores.alibi(slopes)",
        "use slopes=",
    ),
    (
        "logits_soft_cap logit_softcap logits_softcap attn_logits_soft_cap attn_logit_softcapping soft_cap logit_cap",
        "use softcap=",
        "use cap=",
        "use score=cuflash.scores.softcap(cap)",
    ),
    (
        "sinks learnable_sink s_aux sink_token attention_sinks softmax_sink sink_logits softmax_type",
        "use sink=, an array with one logit for each query head",
    ),
    ("add_zero_attn", "use sink=np.zeros(num_heads, np.float32)"),
    # Dropout
    ("dropout_p dropout_rate dropout_probability dropout_prob attn_dropout attention_dropout p", _DROPOUT, "use p="),
    (
        "dropout_rng dropout_key seed rng rng_state generator philox_seed",
        "use dropout=cuflash.Dropout(p, seed=seed), with an int as the seed",
        "use seed=",
    ),
    ("broadcast_dropout", "leave it out: dropout draws every element of the weights independently"),
    ("training is_training is_inference inference", _DROPOUT),
    # Heads, sizes and layouts
    (
        "enable_gqa num_key_value_groups num_gqa_groups is_mqa n_rep head_mapping",
        "leave it out: k and v may have fewer heads than q (GQA, MQA), head h of q reading head "
        "h // (num_heads / num_kv_heads)",
    ),
    ("num_heads num_attention_heads n_heads nheads num_qo_heads q_num_heads H", _SIZES, "use num_heads="),
    ("num_kv_heads num_key_value_heads kv_num_heads n_kv_heads nheads_k", _SIZES, "use num_kv_heads="),
    ("embed_dim key_dim head_size headdim head_dim_qk kv_channels d_head head_dim", _SIZES, "use head_dim="),
    ("vdim head_dim_vo v_head_dim head_dim_v", _SIZES, "use value_dim="),
    ("batch_size bsz max_batch_size B", _SIZES, "use batch="),
    ("q_len seq_len seq_length Q_LEN", _SIZES, "use seqlen_q="),
    ("KV_LEN kv_seq_len", _SIZES, "use seqlen_kv="),
    ("layout tensor_layout qkv_format qkv_layout kv_layout head_first batch_first", _AXES, _AXES_PACKED),
    ("dim", _SIZES, _AXES_PACKED),
    (
        "dtype out_dtype output_dtype o_dtype target_dtype",
        "leave it out: o has the dtype of q; cast it with o.astype(dtype)",
    ),
    (
        "device stream",
        "leave it out: calls run on the device of the arrays, on the current stream",
        "use xp=numpy or xp=cupy",
    ),
    # Results
    (
        "return_softmax_lse return_residual save_residuals return_aux return_softmax_stats generate_stats",
        "use return_lse=True",
    ),
    ("need_weights average_attn_weights output_attentions return_attention_scores return_weights", _WEIGHTS),
    ("return_attn_probs return_softmax", "use return_lse=True for lse; weights are never stored"),
    ("requires_grad", "call cuflash.attention_vjp, or the attention of cuflash.torch or cuflash.jax"),
    # Caches
    ("k_cache key_cache", _CACHE, "use k_pages="),
    ("v_cache value_cache", _CACHE, "use v_pages="),
    ("kv_cache paged_kv_cache past_key_value past_key_values past_key layer_past use_cache cache_position", _CACHE),
    ("cache_seqlens cache_lens", _CACHE, "use lengths="),
    ("cache_batch_idx cache_leftpad leftpad_k", _CACHE),
    ("max_cache_len max_seq_len max_length", _CACHE, "use capacity="),
    (
        "block_table block_tables page_table page_tables paged_kv_indices paged_kv_indptr paged_kv_last_page_len "
        "kv_page_indices",
        _PAGES,
        "use block_table=",
    ),
    ("slot_mapping append_positions", _CACHE, "use counts= for the tokens of each sequence"),
    (
        "rotary_cos rotary_sin rotary_interleaved rope_theta rope_scale pos_encoding_mode position_ids "
        "position_embeddings",
        "leave it out: rotate q and k before the call",
    ),
    # Kernels
    (
        "implementation attn_implementation backend op flash_attention use_flash",
        'use executor= ("cpu", "gpu" or "sim") or kernel= (a family of kernels)',
        'use executor= ("cpu", "gpu" or "sim")',
    ),
    (
        "kernel_options block_sizes num_splits num_stages num_warps pack_gqa sm_margin scheduler_metadata enable_pdl",
        _TILES,
    ),
    ("block_size BLOCK_SIZE", "leave it out: kernels choose their tiles", "use block=", "use page_size="),
    (
        "q_descale k_descale v_descale q_scale k_scale v_scale scale_q scale_k scale_v",
        "leave it out: pass q, k and v as cuflash.quantize(x) returns them, with their scales",
    ),
    ("use_fp8 fp8", 'pass cuflash.quantize(q), and so for k and v'),
    ("allow_tf32 use_tf32 input_precision matmul_precision", 'use precision="tf32" or precision="ieee"'),
    (
        "precision_config preferred_element_type softmax_precision force_fp32_for_softmax use_fp16_qk_reduction",
        "leave it out: sums and softmax are in float32, and in float64 for arrays of float64",
    ),
    ("head_mask", "leave it out: multiply the result, o * head_mask[:, None, None]"),
    # Block-sparse attention
    (
        "top_k topk top_p num_blocks",
        "pass the index that cuflash.selectors.pooled(q, k, budget=budget) returns as the mask",
        "use budget=cuflash.selectors.Budget(top_k=count) or budget=cuflash.selectors.Budget(mass=part)",
    ),
)

# Sentences that apply to one call only: the call, the names, and the sentence.
_OF_ONE_CALL = (
    ("KVCache.attention", "is_causal", "use causal=, True by default: the last query is at the last position"),
    ("KVCache.attention", "mask", "use causal= and window=(left, 0); queries attend only their own sequence"),
    ("KVCache", "num_heads", "use num_kv_heads=, the heads of keys and values"),
    (
        "Sequences.of",
        "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv q_offsets kv_offsets qo_indptr kv_indptr",
        "call cuflash.masks.Sequences(q_offsets, kv_offsets), which takes offsets",
    ),
    ("Lengths", "query_seq_lengths query_lengths q_lengths q_seqlen seq_len_q seqused_q", "use q="),
)

ELSEWHERE: dict[str, list[str]] = {name: sentences for names, *sentences in _TABLE for name in names.split()}
OF_ONE_CALL = {(call, name): sentence for call, names, sentence in _OF_ONE_CALL for name in names.split()}
