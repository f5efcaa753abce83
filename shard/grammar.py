"""What an answer's grammar allows next: llguidance's matcher, kept in step with the answer.

Theory of operation. A session with a grammar owns one `GrammarMatcher`. Its work (compiling, following the answer's
tokens, computing the mask over the vocabulary) is done on a worker thread, where llguidance lets go of the
interpreter's lock:

=====================================  ======================================================================
a step arrives                         `foresee` its answer: ready already in decoding; a rebuilding prefill is
                                       followed while the layers run
a token is about to be drawn           `mask` waits for the worker
it has been drawn                      `foresee` the answer with it: done while the other hops work
the next step brings other tokens      `mask` notices, starts over and follows those
=====================================  ======================================================================

llguidance ends an answer by its tokenizer's own end tokens; here the request's `end_ids` take their place.

Shapes: V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shard.grammar_worker import GrammarWorker
from shard.step_check import bad_step
from shared.errors import StepFailed
from shared.fields import GRAMMAR_START_FUEL, GRAMMAR_STEP_FUEL

REASON_CHARS_MAX = 300
"""How much of llguidance's reason is repeated: it quotes the grammar."""

FOLLOW_S_MAX = 10.0
"""How long a draw waits for its mask, the first of all for the tokenizer too. Masks take far below a millisecond; a
grammar that slips through all bounds and computes for ever must not keep the node's other sessions waiting."""

_LIMITS = LLParserLimits(  # verbose errors would show the answer
    verbose_errors=False, initial_lexer_fuel=GRAMMAR_START_FUEL, step_lexer_fuel=GRAMMAR_STEP_FUEL
)

_TOO_COMPLEX = ("lexer error", "max is", "too many", "limit")
_TOO_LONG = f"takes more than {FOLLOW_S_MAX:g} s to follow"

Tokenizer = Callable[[], LLTokenizer]
"""Gives the node's one tokenizer; the first call takes about a second."""
Mask = npt.NDArray[np.bool_]


class GrammarMatcher:
    """One session's place in its grammar, a `shard.drawing.Matcher`. For one thread at a time.

    Args:
        grammar: llguidance's grammar text. It is compiled by the worker: `mask` says if it cannot be.
        end_ids: Tokens that end the answer where the grammar is satisfied; llguidance's own where empty.
        vocab_size: V, the model's; ids that the tokenizer does not have are never allowed.
        tokenizer: Called on the worker.
        worker: Does the work.
    """

    def __init__(
        self, grammar: str, end_ids: Sequence[int], *, vocab_size: int, tokenizer: Tokenizer, worker: GrammarWorker
    ) -> None:
        self.grammar = grammar
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._worker = worker
        self._place: _Place | None = None
        self._work: Future[_Place] | None = None
        self._foreseen: list[int] | None = None
        self._is_given_up = False

    def foresee(self, answer: Sequence[int]) -> None:
        """Begin to work out what may follow these tokens of the answer. Does not wait, unless for the work before."""
        ids = list(answer)
        if ids == self._foreseen:
            return
        if self._is_given_up:
            raise bad_grammar(_TOO_LONG)
        place = self._settled()
        self._foreseen = ids
        self._work = self._worker.submit(self._follow, place, ids)

    def mask(self, answer: Sequence[int]) -> Mask:
        """Which tokens may follow these tokens of the answer: ``[V]``, not to be written to.

        Raises:
            StepFailed: `bad_grammar` when the grammar cannot be compiled, is too complex, takes too long, or does not
                accept the answer.
        """
        self.foresee(answer)
        place = self._settled()
        if place is None:
            raise ValueError("a place that was foreseen is missing")
        return place.mask

    def copy(self) -> GrammarMatcher:
        """One of its own, at the same place."""
        other = GrammarMatcher(
            self.grammar,
            tuple(self._end_ids),
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            worker=self._worker,
        )
        try:
            place = self._settled()
        except StepFailed:
            return other  # it meets the same failure in a step of its own, which is told
        if place is not None:
            other._place, other._foreseen = place.copy(), list(place.answer)
        return other

    def _settled(self) -> _Place | None:
        """Wait for what the worker does. Whatever it raised is raised here, and the next work starts over."""
        work, self._work = self._work, None
        if work is not None:
            self._place, foreseen, self._foreseen = None, self._foreseen, None
            try:
                self._place = work.result(FOLLOW_S_MAX)
            except TimeoutError as error:
                self._is_given_up = True
                self._worker.abandon()
                raise bad_grammar(_TOO_LONG) from error
            self._foreseen = foreseen
        return self._place

    def _follow(self, place: _Place | None, answer: list[int]) -> _Place:
        """On the worker: the place after these tokens, with its mask."""
        if place is None or place.answer != answer[: len(place.answer)]:
            place = _Place(_compile(self.grammar, self._tokenizer()), self._end_ids)
        place.advance(answer)
        place.mask = self._mask_at(place)
        return place

    def _mask_at(self, place: _Place) -> Mask:
        mask = np.zeros(self._vocab_size, np.bool_)
        if not place.ended:
            bits = np.unpackbits(np.frombuffer(place.matcher.compute_bitmask(), np.uint8), bitorder="little")
            known = min(bits.size, self._vocab_size)
            mask[:known] = bits[:known]
            _check(place.matcher, "is too complex")
        if self._end_ids:
            own_ends = [token for token in self._tokenizer().eos_tokens if token < self._vocab_size]
            mask[own_ends] = False
            mask[list(self._end_ids)] |= place.may_end
        return mask


class _Place:
    """A compiled grammar and the tokens that it has followed."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.answer: list[int] = []
        self.ended = False
        self.mask: Mask = np.empty(0, np.bool_)
        self._end_ids = end_ids

    @property
    def may_end(self) -> bool:
        """Whether the grammar is satisfied."""
        return self.ended or self.matcher.is_accepting()

    def advance(self, answer: list[int]) -> None:
        """Follow the tokens that are new.

        Raises:
            StepFailed: `bad_grammar` when the grammar does not allow one of them, or is too complex for it.
        """
        for token in answer[len(self.answer) :]:
            if token in self._end_ids and self.may_end:
                self.ended = True
            elif self.ended or not self.matcher.consume_token(token):
                raise self._refusal()
            self.answer.append(token)

    def _refusal(self) -> StepFailed:
        """Why a token was not consumed. llguidance's words for one that does not fit quote it: ours do not."""
        reason = self.matcher.get_error() if self.matcher.is_error() else ""
        if any(sign in reason for sign in _TOO_COMPLEX):
            return bad_grammar(f"is too complex: {_shown(reason)}")
        return bad_grammar(f"does not accept token {len(self.answer)} of the answer")

    def copy(self) -> _Place:
        other = _Place(self.matcher.deep_copy(), self._end_ids)
        other.answer, other.ended, other.mask = list(self.answer), self.ended, self.mask
        return other


def load_tokenizer(tokenizer_json: str, end_ids: Sequence[int]) -> LLTokenizer:
    """What llguidance makes of a model's tokenizer. Takes a second for 150,000 tokens, and lets nothing else run.

    Args:
        tokenizer_json: The text of the model's tokenizer.json.
        end_ids: The model's end of sequence; llguidance guesses where there is none.

    Raises:
        StepFailed: `bad_step`: this node has no tokenizer that grammars can use.
    """
    try:
        return LLTokenizer(tokenizer_json, eos_token=list(end_ids) or None)
    except ValueError as error:
        reason = str(error)[:REASON_CHARS_MAX]
        raise bad_step("sampling.grammar", f"cannot be followed: the model's tokenizer.json: {reason}") from error


def _compile(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    _check(matcher, "cannot be compiled")
    return matcher


def _check(matcher: LLMatcher, what: str) -> None:
    if matcher.is_error():
        raise bad_grammar(f"{what}: {_shown(matcher.get_error())}")


def _shown(reason: str) -> str:
    return reason.removesuffix("<non-verbose/>")[:REASON_CHARS_MAX].strip()


def bad_grammar(message: str) -> StepFailed:
    """What is wrong with a session's grammar; no other node would follow it either."""
    return StepFailed("bad_grammar", f"the grammar {message}", field="sampling.grammar")
