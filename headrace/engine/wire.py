"""Between the core's values and the messages that cross the process boundary. Field by field, nothing decided."""

from headrace.core.outputs import ChoiceOutput, TokenLogprob
from headrace.core.outputs import Gauges as CoreGauges
from headrace.core.request import Request, SamplingParams
from headrace.engine import messages
from headrace.engine.generation import GenerationRequest

_SAMPLING_FIELDS = messages.Sampling.__struct_fields__


def add_message(request: GenerationRequest, arrival_ns: int) -> messages.Add:
    values = {name: getattr(request.params, name) for name in _SAMPLING_FIELDS}
    values["logit_bias"] = list(request.params.logit_bias)
    values["stop_token_ids"] = list(request.params.stop_token_ids)
    return messages.Add(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=messages.Sampling(**values),
        arrival_ns=arrival_ns,
        n=request.n,
        cache_salt=request.cache_salt,
    )


def core_requests(add: messages.Add) -> list[Request]:
    """One core Request per choice that has not finished. They share the prompt's list, which nobody changes."""
    values = {name: getattr(add.sampling, name) for name in _SAMPLING_FIELDS}
    values["logit_bias"] = tuple((token_id, bias) for token_id, bias in add.sampling.logit_bias)
    values["stop_token_ids"] = tuple(add.sampling.stop_token_ids)
    params = SamplingParams(**values)
    return [
        Request(
            request_id=add.request_id,
            prompt_token_ids=add.prompt_token_ids,
            params=params,
            arrival_ns=add.arrival_ns,
            choice=choice,
            output_token_ids=list(add.outputs[choice]) if choice < len(add.outputs) else [],
            cache_salt=add.cache_salt,
        )
        for choice in range(add.n)
        if choice not in add.done_choices
    ]


def output_message(output: ChoiceOutput) -> messages.Output:
    return messages.Output(
        request_id=output.request_id,
        choice=output.choice,
        token_ids=output.token_ids,
        finish_reason=None if output.finish_reason is None else output.finish_reason.value,
        logprobs=_logprobs(output.logprobs),
        prompt_logprobs=_logprobs(output.prompt_logprobs),
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )


def gauges_message(gauges: CoreGauges) -> messages.Gauges:
    return messages.Gauges(gauges.num_running, gauges.num_waiting, gauges.kv_blocks_used, gauges.kv_blocks_total)


def _logprobs(entries: list[TokenLogprob] | None) -> list[messages.TokenLogprob] | None:
    if entries is None:
        return None
    return [messages.TokenLogprob(entry.token_id, entry.logprob, entry.top) for entry in entries]
