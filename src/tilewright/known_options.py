"""The options of the reference that we do not have, and what becomes of them here.

Each is accepted with a line that says why it changes nothing, or refused with what to use instead.
The names are those of `torch._inductor.config` of torch 2.11 to 2.15; options that we have are not
among them (`config.py`). `docs/options.md` shows both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A name of the reference's. `refused`: setting it is an error; `why` says what to do, or why
    nothing needs to be done."""

    name: str
    why: str
    refused: bool


_DECIDED = "decided for each program by the bytes it moves; there is nothing to switch"
_MACHINE = "a detail of how the reference builds or launches kernels; ours are built otherwise"
_CHECKS = "a check inside the reference's compiler; ours verifies every stage anyway"
_TRACE = "the reference's own log; TILEWRIGHT_DEBUG (`debug`, `debug_dir`) shows ours"
_CARDS = "for a device that no kernels are written for here"
_FREES = "communication is left as it is in the graph"
_TESTING = "a switch of the reference's own tests"
_NUMERICS = "results are rounded where eager rounds them, always"

# why setting it changes nothing -> names
ACCEPTED: dict[str, str] = {
    _DECIDED: """
        aggressive_fusion debug_fusion loop_ordering_after_fusion loop_reindexing_after_fusion
        loop_index_inversion_in_fusion score_fusion_memory_threshold min_overlap_ratio
        max_fusion_buffer_group_pairwise_attempts max_fusion_unique_io_buffers
        max_complex_pointwise_cat_inputs split_reductions min_num_split pick_loop_orders
        reorder_for_locality dynamic_scale_rblock online_softmax inplace_padding
        can_inplace_pad_graph_input realize_cpu_opcount_threshold realize_cpu_acc_reads_threshold
        delay_realize_cheap_outputs constant_and_index_propagation compute_all_bounds
        epilogue_fusion_with_atomic_add epilogue_fusion_first split_cat_fx_passes group_fusion
        permute_fusion expand_dimension_for_pointwise_nodes small_memory_access_threshold
        optimize_scatter_upon_const_tensor joint_graph_constant_folding b2b_gemm_pass
        decompose_mem_bound_mm force_fuse_int_mm_with_mul keep_addmm_fused_for_half_dtypes
        use_mixed_mm mixed_mm_choice efficient_conv_bn_eval_fx_passes enable_linear_binary_folding
        pad_channels_last pad_dynamic_shapes disable_padding_cpu layout_opt_default
        partitioned_scatter_enabled partitioned_scatter_min_partitions
        partitioned_scatter_max_partitions partitioned_scatter_memory_budget
        reorder_for_peak_memory_debug size_threshold_for_succ_based_strategy memory_pool
        benchmark_combo_kernel combo_kernels_autotune combo_kernel_allow_mixed_sizes
        combo_kernel_foreach_dynamic_shapes combo_kernel_per_subkernel_blocks
        combo_kernel_autotune_grouping combo_kernel_peak_memory_increase_gb
        combo_kernel_peak_memory_pct_threshold combo_kernel_max_distance
        multi_kernel_hints graph_partition static_weight_shapes apply_gumbel_max_trick
        auto_chunker.enable auto_chunker.output_size_threshold
        auto_chunker.amplify_ratio_threshold auto_chunker.num_chunk
        triton.max_tiles triton.prefer_nd_tiling triton.tile_reductions triton.dense_indexing
        triton.coalesce_tiling_analysis triton.tiling_prevents_pointwise_fusion
        triton.tiling_prevents_reduction_fusion triton.persistent_reductions triton.multi_kernel
        triton.force_cooperative_reductions triton.use_two_step_variance_min_numel
        triton.use_two_step_variance_threshold triton.min_split_scan_rblock
        triton.mix_order_reduction triton.mix_order_reduction_initial_xblock
        triton.mix_order_reduction_split_size triton.mix_order_reduction_autotune_split_size
        triton.mix_order_reduction_non_strict_mode triton.mix_order_reduction_max_reads
        triton.mix_order_reduction_allow_multi_stages triton.nested_reduction
        triton.decompose_sort_ops triton.use_block_ptr triton.use_tensor_descriptor
        triton.transpose_discontiguous_tensor_descriptor triton.num_decompose_k_splits
        triton.decompose_k_threshold cpp.no_redundant_loops cpp.max_horizontal_fusion_size
        cpp.enable_tiling_heuristics cpp.enable_loop_tail_vec cpp.use_two_step_variance_threshold
        cpp.fallback_scatter_reduce_sum cpp.enable_concat_linear cpp.enable_grouped_gemm_template
        benchmark_template_fusion max_template_fusion_benchmarked_choices bmm_shared_a
        combo_kernel_compile_time_autotune fusion_memory_timeline_peak_memory_increase_gb
        fusion_memory_timeline_peak_memory_pct_threshold partitioned_scatter_force
        partitioned_scatter_min_contention_ratio partitioned_scatter_min_index_size
        partitioned_scatter_non_model_floor_bytes realize_opusers_threshold
        reorder_for_locality_in_training triton.scalar_accumulators var_std_reduction_dedup
    """,
    _MACHINE: """
        cpp_wrapper_build_separate cpp_cache_precompile_headers use_static_cuda_launcher
        use_static_triton_launcher static_launch_user_defined_triton_kernels
        strict_static_cuda_launcher strict_static_triton_launcher keep_static_cubin_raw
        use_fast_triton_launcher use_launch_metadata_schema worker_start_method
        worker_suppress_logging worker_log_path torchinductor_worker_logpath
        quiesce_async_compile_pool quiesce_async_compile_time file_lock_timeout
        compile_worker_wait_timeout sleep_sec_TESTING_ONLY global_cache_dir
        bundle_triton_into_fx_graph_cache non_blocking_remote_cache_write
        bundled_autotune_remote_cache search_autotune_cache kernel_name_max_ops comment_origin
        benchmark_harness use_experimental_benchmarker use_torch_profiler_benchmarker
        triton_disable_device_detection assume_aligned_inputs assume_32bit_indexing
        assume_unaligned_fallback_output keep_output_stride warn_mix_layout cache_sdpa_constraint
        triton.store_cubin triton.divisible_by_16 triton.emit_pointer_range_32
        triton.spill_threshold triton.skip_l1_cache triton.unique_kernel_names
        triton.unique_user_kernel_names triton.descriptive_names triton.autotune_pointwise
        triton.autotune_cublasLt triton.autotune_at_compile_time
        triton.autotune_with_sample_inputs triton.dynamic_disable_pipelining
        triton.enable_tma_load_for_template_epilogue cpp.dynamic_threads cpp.min_chunk_size
        cpp.march cpp.descriptive_names cpp.gemm_max_k_slices cpp.gemm_cache_blocking
        cpp.gemm_thread_factors cpp.use_decompose_tanh cpp.use_small_dequant_buffer
        cpp.force_inline_kernel cpp.use_constexpr_for_int_array cpp.weight_prepack
        cpp.enable_floating_point_contract_flag cpp.vec_isa_ok external_matmul
        triton.cudagraph_trees triton.cudagraph_skip_dynamic_graphs
        triton.cudagraph_capture_sizes triton.cudagraph_min_partition_size
        triton.cudagraph_support_input_mutation triton.cudagraph_unexpected_rerecord_limit
        triton.cudagraph_dynamic_shape_warn_limit triton.force_cudagraph_sync
        triton.force_cudagraphs_warmup triton.reorder_for_reducing_graph_partitions
        triton.cudagraph_partition_memory_budget triton.skip_cudagraph_warmup
        cudagraph_policy cudagraph_unsafe_unbacked_ops autotune_lookup_table
        coordinate_descent_check_all_directions coordinate_descent_search_radius
        incremental_autotune distributed_max_autotune_gemm unbacked_symint_fallback
        max_autotune_subproc_graceful_timeout_seconds
        max_autotune_subproc_terminate_timeout_seconds cutedsl_enable_autotuning
        enable_auto_functionalized_v2 triton_kernel_default_layout_constraint
        implicit_fallbacks fallback_embedding_bag_byte_unpack bw_outputs_user_visible
        enable_autograd_for_aot annotate_training run_jit_post_compile_hook
        unsafe_ignore_unsupported_triton_autotune_args dce use_dce
        autotune_cudagraph_benchmarking autotune_cudagraph_benchmarking_iters
        compile_worker_mode compile_worker_watchdog_interval_seconds
        cpp.enable_kernel_context_guard cuda.autotune_tunableop_dynamic_dims_wildcard
        flydsl_enable_autotuning nvgemm_pdl nvgemm_swap_ab use_rand4x
        triton.cudagraph_dynamic_shape_rerecord_limit
        triton.cudagraph_initial_mempool_allocation_gb
        triton.cudagraph_managed_input_rerecord_action
        triton.cudagraph_managed_input_rerecord_limit triton.cudagraph_trees_generation_cloning
        triton.enable_flex_tdm triton.enable_host_side_tma triton.enable_template_autows
        triton.tlx_mode triton.enable_tlx_templates
    """,
    _CHECKS: """
        size_asserts scalar_asserts alignment_asserts debug_index_asserts debug_ir_traceback
        do_not_emit_runtime_assertions triton.slow_path_cudagraph_asserts
        triton.fast_path_cudagraph_asserts triton.cudagraph_or_error
        triton.cudagraph_trees_history_recording triton.cudagraph_trees_objgraph
        fx_passes_numeric_check generate_intermediate_hooks triton.debug_sync_graph
        triton.debug_sync_kernel developer_warnings
        write_are_deterministic_algorithms_enabled
        alignment_asserts_inputs unsafe_skip_scalar_range_asserts
    """,
    _TRACE: """
        disable_progress verbose_progress log_tlparse enabled_metric_tables save_args
        profile_bandwidth profile_bandwidth_regex profile_bandwidth_output
        profile_bandwidth_with_do_bench_using_profiling profiler_mark_wrapper_call
        cpp.enable_kernel_profile triton.debug_dump_kernel_inputs
        triton.max_kernel_dump_occurrences triton.proton_profiling triton.proton_output_dir
        triton.proton_group_by_sm triton.proton_split_invocations triton.proton_per_cta_occupancy
        autoheuristic_collect.pad_mm autoheuristic_collect.mixed_mm autoheuristic_use.pad_mm
        autoheuristic_use.mixed_mm autoheuristic_log_path autoheuristic_collect autoheuristic_use
        wrap_inductor_compiled_regions
    """,
    _FREES: """
        reorder_for_compute_comm_overlap reorder_for_compute_comm_overlap_passes
        reorder_prefetch_limit bucket_all_gathers_fx bucket_all_gathers_fx_bucket_size_determinator
        bucket_all_gathers_bucket_mode dedup_reduce_scatters bucket_reduce_scatters_fx
        bucket_reduce_scatters_fx_bucket_size_determinator bucket_reduce_scatters_bucket_mode
        bucket_all_reduces_fx bucket_all_reduces_fx_bucket_size_determinator estimate_op_runtime
        runtime_estimations_mms_benchmark intra_node_bw inter_node_bw cpu_gpu_bw
        collective_benchmark_nruns collective_benchmark_timeout
        decompose_shard_dim_alltoall
    """,
    "results lie in memory as eager's do, always": """
        strict_output_strides
    """,
    _NUMERICS: """
        emulate_precision_casts_on_saved_tensors triton.codegen_upcast_to_fp32
        eager_numerics.division_rounding eager_numerics.disable_ftz
        eager_numerics.use_pytorch_libdevice
        strict_signed_zero force_same_precision
    """,
}
_LEAVES = """
    use_binary_remote_cache upload_to_binary_remote_cache binary_remote_cache_force_write
    nvgemm_max_profiling_configs
"""
ACCEPTED["a setting of CUTLASS kernels that those offered here do not have"] = " ".join(
    [f"{group}.{leaf}" for group in ("cutlass", "cuda") for leaf in _LEAVES.split()]
    + ["nvgemm_max_profiling_configs", "nvgemm_supplement_configs"]
)
# what starts so changes nothing either
ACCEPTED_GROUPS = {
    "trace.": _TRACE,
    "aten_distributed_optimizations.": _FREES,
    "halide.": _CARDS,
    "rocm.": _CARDS,
    "xpu.": _CARDS,
    "mtia.": _CARDS,
}

# refused: what to use instead -> names
REFUSED: dict[str, str] = {
    (
        "programs for use without Python are not made here; `torch.compile(f, "
        "...).aot_compile(...)` saves a program for Python"
    ): """
        cpp_wrapper fx_wrapper aot_inductor_mode.compile_standalone
    """,
    "use the option `force_disable_caches`, or `fx_graph_cache`": """
        fx_graph_remote_cache remote_gemm_autotune_cache unsafe_skip_cache_dynamic_shape_guards
        unsafe_marked_cacheable_functions
    """,
    "a module keeps its parameters: what `freezing` computes of them is kept beside": """
        freezing_discard_parameters
    """,
    "passes of your own are `pre_grad_custom_pass`, `joint_custom_pre_pass`, "
    "`joint_custom_post_pass`, `post_grad_custom_pre_pass` and `post_grad_custom_post_pass`; those "
    "of the reference do not run here": """
        custom_partitioner_fn pre_grad_fusion_options post_grad_fusion_options add_pre_grad_passes
        remove_pre_grad_passes disabled_passes use_pre_grad_passes pre_grad_pass_timing
        use_joint_graph_passes use_post_grad_passes is_predispatch custom_should_partition_ops
        inductor_choices_class
    """,
    "results are eager's: use `config.fallback_random` for its random numbers": """
        align_random_eager
    """,
    "results are never made less exact; leave it out": """
        use_fast_math cpp.enable_unsafe_math_opt_flag
    """,
    "look for NaN in the results: kernels do not": """
        nan_asserts runtime_triton_nan_asserts
    """,
    "leave it out: elements are rounded as eager rounds them, and sums are added up in an order of "
    "their own": """
        numerics
    """,
    "leave it out: every index that is data is checked": """
        assert_indirect_indexing
    """,
    "set `torch.use_deterministic_algorithms(True)`, or the option `deterministic`": """
        batch_invariant
    """,
    "choose the backend with `torch.compile(backend=...)`": """
        cpu_backend cuda_backend tpu_backend xpu_backend disable_cpp_codegen
    """,
    "every operator is compiled or left to ATen as `tilewright.explain` shows": """
        fallback_by_default selective_decompose always_keep_tensor_constants
    """,
    "use `layout_optimization`": """
        force_layout_optimization
    """,
    "use `autotune_effort`": """
        max_autotune_flex_search_space
    """,
    "convolutions are the library's: there is nobody else to name": """
        max_autotune_conv_bwd_weight_backends max_autotune_conv_bwd_input_backends
    """,
    _TESTING: """
        cpp.inject_relu_bug_TESTING_ONLY cpp.inject_log1p_bug_TESTING_ONLY
        triton.inject_relu_bug_TESTING_ONLY force_disable_cudagraph_TESTING_ONLY
        check_stack_no_cycles_TESTING_ONLY always_complex_memory_overlap_TESTING_ONLY
        triton.disallow_failing_autotune_kernels_TESTING_ONLY
    """,
}
REFUSED_GROUPS = {
    "aot_inductor.": "programs for use without Python are not made here; `aot_compile` saves one "
    "for Python",
    "test_configs.": _TESTING,
    "lookup_table.": "choices are kept in the tuning database, and pinned with "
    "`test_configs.autotune_choice_name_regex`",
}


def _listed() -> dict[str, Known]:
    found: dict[str, Known] = {}
    for table, refused in ((ACCEPTED, False), (REFUSED, True)):
        for why, names in table.items():
            found.update({name: Known(name, why, refused) for name in names.split()})
    return found


KNOWN = _listed()


def known(name: str) -> Known | None:
    """What is known of a name that is not an option of ours."""
    if name in KNOWN:
        return KNOWN[name]
    for groups, refused in ((ACCEPTED_GROUPS, False), (REFUSED_GROUPS, True)):
        for prefix, why in groups.items():
            if name.startswith(prefix):
                return Known(name, why, refused)
    return None
