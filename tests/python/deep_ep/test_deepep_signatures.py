"""The interface of DeepEP 2.1: names of arguments, their order and defaults, so that any caller's form of a call is taken; and its page."""

import contextlib
import inspect
import io
import pathlib
import re

import pytest

pytest.importorskip("torch")
import turnout.deep_ep as deep_ep  # noqa: E402

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "deep_ep.md"
SIGNATURES = {
    "Config": "num_sms=20 num_max_nvl_chunked_send_tokens=6 num_max_nvl_chunked_recv_tokens=256 num_max_rdma_chunked_send_tokens=6 "
    "num_max_rdma_chunked_recv_tokens=256",
    "Config.get_nvl_buffer_size_hint": "self hidden_bytes num_ranks",
    "Config.get_rdma_buffer_size_hint": "self hidden_bytes num_ranks",
    "EventHandle": "",
    "EventHandle.current_stream_wait": "self",
    "EventOverlap": "event=None extra_tensors=None",
    "EventOverlap.current_stream_wait": "self release_handle=False",
    "EventOverlap.register_hook_after_wait": "self fn",
    "EventOverlap.__call__": "self release_handle=False",
    "Buffer": "group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24 allow_nvlink_for_low_latency_mode=True allow_mnnvl=False "
    "explicitly_destroy=False enable_shrink=False comm=None",
    "Buffer.destroy": "self",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "Buffer.get_comm_stream": "self",
    "Buffer.get_local_buffer_tensor": "self dtype size=None offset=0 use_rdma_buffer=False",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.get_dispatch_layout": "self topk_idx num_experts previous_event=None async_finish=False allocate_on_comm_stream=False",
    "Buffer.dispatch": "self x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None num_tokens_per_expert=None "
    "topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0 config=None previous_event=None async_finish=False allocate_on_comm_stream=False",
    "Buffer.combine": "self x handle topk_weights=None bias=None config=None previous_event=None async_finish=False allocate_on_comm_stream=False",
    "Buffer.clean_low_latency_buffer": "self num_max_dispatch_tokens_per_rank hidden num_experts",
    "Buffer.low_latency_dispatch": "self x topk_idx num_max_dispatch_tokens_per_rank num_experts cumulative_local_expert_recv_stats=None "
    "dispatch_wait_recv_cost_stats=None use_fp8=True round_scale=False use_ue8m0=False async_finish=False return_recv_hook=False",
    "Buffer.low_latency_combine": "self x topk_idx topk_weights handle use_logfmt=False zero_copy=False async_finish=False return_recv_hook=False out=None "
    "combine_wait_recv_cost_stats=None",
    "Buffer.low_latency_update_mask_buffer": "self rank_to_mask mask=False",
    "Buffer.low_latency_query_mask_buffer": "self mask_status",
    "Buffer.low_latency_clean_mask_buffer": "self",
    "Buffer.get_next_low_latency_combine_buffer": "self handle",
    "ElasticBuffer": "group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False deterministic=False "
    "allow_hybrid_mode=True allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 "
    "num_gpu_timeout_secs=100 explicitly_destroy=False",
    "ElasticBuffer.destroy": "self",
    "ElasticBuffer.get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False allow_hybrid_mode=True "
    "allow_multiple_reduction=True",
    "ElasticBuffer.barrier": "self use_comm_stream=True with_cpu_sync=False sequential=True",
    "ElasticBuffer.capture": "",
    "ElasticBuffer.get_comm_stream": "self",
    "ElasticBuffer.get_theoretical_num_sms": "self num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200 sm_write_gbs=50",
    "ElasticBuffer.get_theoretical_num_qps": "self num_sms",
    "ElasticBuffer.dispatch": "self x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None num_max_tokens_per_rank=None "
    "expert_alignment=None num_sms=0 num_qps=0 previous_event=None previous_event_before_epilogue=None async_with_compute_stream=False "
    "allocate_on_comm_stream=False handle=None do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.combine": "self x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None previous_event_before_epilogue=None "
    "async_with_compute_stream=False allocate_on_comm_stream=False",
    "ElasticBuffer.engram_write": "self storage sf=None",
    "ElasticBuffer.engram_fetch": "self indices num_qps=0 use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.pp_set_config": "self num_max_tensor_bytes num_max_inflight_tensors",
    "ElasticBuffer.pp_send": "self t dst_rank_idx num_sms=0",
    "ElasticBuffer.pp_recv": "self t src_rank_idx num_sms=0",
    "ElasticBuffer.agrs_new_session": "self enabled=True",
    "ElasticBuffer.agrs_set_config": "self num_max_session_bytes num_max_all_gathers_per_session",
    "ElasticBuffer.agrs_get_inplace_tensor": "self shapes dtype",
    "ElasticBuffer.all_gather": "self t",
    "get_physical_domain_size": "group",
    "get_logical_domain_size": "group allow_hybrid_mode=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    found = deep_ep
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    told = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters]
    assert told == SIGNATURES[name].split()


def test_everything_public_has_a_docstring():
    for name in deep_ep.__all__:
        assert name == "topk_idx_t" or getattr(deep_ep, name).__doc__, name
    for name in SIGNATURES:
        assert name.split(".")[0] in deep_ep.__all__, name
    for method in (deep_ep.Buffer.dispatch, deep_ep.Buffer.combine, deep_ep.Buffer.low_latency_dispatch, deep_ep.Buffer.low_latency_combine,
                   deep_ep.ElasticBuffer.dispatch, deep_ep.ElasticBuffer.combine, deep_ep.HybridEPBuffer.dispatch_with_permute,
                   deep_ep.HybridEPBuffer.combine_with_unpermute):  # fmt: skip
        assert "Returns" in method.__doc__ or method.__doc__.count("[T, H]"), method


def test_the_program_of_the_page_runs():
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "run_virtual_ranks" in block]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {})  # noqa: S102
    # Experts 0 and 3 are on either rank: each token comes back twice itself.
    assert said.getvalue().strip() == str([("512.0", [8, 0]), ("512.0", [0, 8])]).replace("'512.0'", "tensor(512., dtype=torch.bfloat16)")
