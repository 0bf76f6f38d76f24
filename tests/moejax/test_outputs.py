from moejax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_a_completion_is_finished_when_it_has_a_reason():
    running = CompletionOutput(index=0, text="a", token_ids=[5])
    assert not running.finished()
    assert CompletionOutput(0, "a", [5], finish_reason="length").finished()


def test_ttft_counts_from_arrival_and_is_none_before_the_first_token():
    assert RequestMetrics(arrival_s=10.0).ttft_s is None
    assert RequestMetrics(arrival_s=10.0, first_token_s=10.5, finished_s=11.0).ttft_s == 0.5


def test_fields_read_as_vllms():
    completion = CompletionOutput(
        index=0,
        text=" old",
        token_ids=[7],
        cumulative_logprob=-0.5,
        logprobs=[{7: Logprob(-0.5, rank=1, decoded_token=" old")}],
        finish_reason="stop",
        stop_reason=None,
    )
    output = RequestOutput("0", "The", [3], [completion], finished=True)
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][7].decoded_token == " old"
    assert output.metrics is None
