"""From the tokens of one choice to the text its user sees: detokenised, cut at stop strings, counted.

Used by the client of an engine process and by the in-process `LLM` alike. Knows no transport, no other request.

    output tokens   [0 ........ num_output_tokens) [.... waste ....)
                                 ^ the token that completed a stop string is the last that counts

Invariants: text is emitted in order and never holds half a character or a part of a stop string that may yet match; a
finished choice ignores what still arrives; the token that ended a choice by its id is counted and returned, not shown.
"""

from collections.abc import Sequence

from headrace.core.request import FinishReason
from headrace.engine.generation import Delta, GenerationRequest, TokenInfo
from headrace.engine.messages import Output, TokenLogprob
from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


class ChoiceStream:
    """One choice of one request. `push` takes engine outputs in order and gives what the user gains by each."""

    def __init__(self, request: GenerationRequest, choice: int, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._stop_token_ids = frozenset(request.params.stop_token_ids)
        self._min_tokens = request.params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, request.skip_special_tokens, request.prompt_token_ids)
        self._matcher = StopMatcher(request.stop, request.include_stop_str_in_output) if request.stop else None
        self._prompt_logprobs: list[TokenInfo] = []
        self._num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None  # the stop string that ended it, for which the engine must be told

    def push(self, output: Output) -> Delta | None:
        """What this output adds; None when it adds nothing that a user could notice (a chunk of a prompt).

        Never called again once `finish_reason` is set.
        """
        if output.prompt_logprobs:
            self._prompt_logprobs += [self._info(entry) for entry in output.prompt_logprobs]
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        reason = FinishReason(output.finish_reason) if output.finish_reason else None
        text, stop_reason, used = self._read(output.token_ids, reason)
        self.num_output_tokens += used
        if self.stop_string is not None:
            reason = FinishReason.STOP
        elif reason is not None:
            tail, stop_string = self._end()
            text += tail
            if stop_string is not None:  # what was held back completed it: the engine has finished already
                reason, stop_reason = FinishReason.STOP, stop_string
        if not used and reason is None:
            return None
        self.finish_reason = reason
        logprobs = None if output.logprobs is None else [self._info(entry) for entry in output.logprobs[:used]]
        return self._delta(text, output.token_ids[:used], logprobs, stop_reason)

    def _read(self, token_ids: Sequence[int], reason: FinishReason | None) -> tuple[str, int | str | None, int]:
        """(text, stop reason, tokens that count). Stops at the token that completes a stop string."""
        text = ""
        for index, token_id in enumerate(token_ids):
            is_last = index + 1 == len(token_ids)
            if is_last and reason is FinishReason.STOP and token_id in self._stop_token_ids:
                return text, token_id, len(token_ids)
            gained, matched = self._match(self._detokenizer.push(token_id), self.num_output_tokens + index + 1)
            text += gained
            if matched is not None:
                self.stop_string = matched
                return text, matched, index + 1
        return text, None, len(token_ids)

    def _match(self, text: str, num_output_tokens: int) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string found. Below min_tokens nothing stops, so nothing is matched."""
        if self._matcher is None or num_output_tokens < self._min_tokens:
            return text, None
        return self._matcher.push(text)

    def _end(self) -> tuple[str, str | None]:
        text, matched = self._match(self._detokenizer.flush(), self.num_output_tokens)
        if self._matcher is not None and matched is None:
            text += self._matcher.flush()
        return text, matched

    def _delta(
        self, text: str, token_ids: list[int], logprobs: list[TokenInfo] | None, stop_reason: int | str | None
    ) -> Delta:
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return Delta(
            choice=self._choice,
            text=text,
            token_ids=token_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs or None,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
        )

    def _info(self, entry: TokenLogprob) -> TokenInfo:
        top = tuple(self._token(token_id, logprob) for token_id, logprob in entry.top)
        return self._token(entry.token_id, entry.logprob, top)

    def _token(self, token_id: int, logprob: float, top: tuple[TokenInfo, ...] = ()) -> TokenInfo:
        data = self._tokenizer.token_bytes(token_id)
        return TokenInfo(token_id, data.decode("utf-8", "replace"), data, logprob, top)
