"""What each step of a scripted mesh does: which answer it belongs to, which token is next, what goes wrong.

One director serves all nodes of a mesh, from each node's compute thread. Everything follows from the ids that have
entered, the seed and the step's place in its answer, so a step that is computed again after a loss gives the same.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import StepFailed
from shared.messages import SamplingParams, Step
from tests.support.scripted_mesh.logprobs import ANSWER_LOGPROB
from tests.support.scripted_mesh.model import TextCoder
from tests.support.scripted_mesh.script import Fault, Rule, Script

REMEMBERED_MAX = 65_536
"""Sessions, and pairs of prompt and seed, whose answer is remembered; the oldest are forgotten."""


@dataclass(frozen=True)
class Plan:
    """The answer that a session gives.

    Args:
        prompt_len: Positions of its prompt.
        rule: What answers it.
        ids: The answer's tokens without its end.
        end_id: Ends it; None lets it begin again.
        logprobs: Of its first tokens.
    """

    prompt_len: int
    rule: Rule
    ids: Sequence[int]
    end_id: int | None
    logprobs: Sequence[float]

    def token(self, at: int) -> int:
        """The answer's token of this number."""
        if self.end_id is None:
            return self.ids[at % len(self.ids)]
        return self.ids[at] if at < len(self.ids) else self.end_id

    def logprob(self, at: int) -> float:
        """Its log-probability."""
        return self.logprobs[at] if at < len(self.logprobs) else ANSWER_LOGPROB


class Director:
    """Answers the nodes' questions from a script; safe to ask from several threads.

    Args:
        script: What to do.
        coder: Of the served model.
    """

    def __init__(self, script: Script, coder: TextCoder) -> None:
        self.coder = coder
        self._script = script
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._turns: OrderedDict[tuple[tuple[int, ...], int], int] = OrderedDict()
        self._turns_of: Counter[int] = Counter()
        self._met: Counter[tuple[str, int, int]] = Counter()

    def plan(self, session: str, history: Sequence[int], sampling: SamplingParams) -> Plan:
        """The answer of a session that is about to draw the token after `history`.

        Raises:
            StepFailed: `no_rule`.
        """
        with self._lock:
            known = self._plans.get(session)
            prompt_len = sampling.prompt_len or (known.prompt_len if known else len(history))
            if known is None or known.prompt_len != prompt_len:
                known = self._plans[session] = self._new_plan(tuple(history[:prompt_len]), sampling.seed)
                _forget_oldest(self._plans)
            return known

    def faults(self, hop: int, step: Step, history: Sequence[int]) -> list[Fault]:
        """What goes wrong at this hop now that `history` has entered it. What is returned counts as having happened.

        A hop that is not last cannot tell where a prompt ends, so its first chunk counts as the whole; the last one
        can: it draws.
        """
        waits = hop == self._script.mesh.hops - 1 and step.output_len == 0
        with self._lock:
            plan = self._plans.get(step.session)
            if waits and plan is None:
                return []
            rule = plan.rule if plan else self._rule(history)
            if rule is None or not rule.faults:
                return []
            at = len(history) - plan.prompt_len if plan else 0
            return [
                fault for index, fault in enumerate(rule.faults) if self._comes(fault, index, hop, at, step.session)
            ]

    def _comes(self, fault: Fault, index: int, hop: int, at: int, session: str) -> bool:
        if fault.hop_index(self._script.mesh.hops) != hop or fault.at != at:
            return False
        self._met[session, hop, index] += 1
        return not fault.times or self._met[session, hop, index] <= fault.times

    def _rule(self, history: Sequence[int]) -> Rule | None:
        prompt = self.coder.prompt_text(list(history))
        return next((rule for rule in self._script.rules if rule.match.fits(prompt)), None)

    def _new_plan(self, prompt: tuple[int, ...], seed: int) -> Plan:
        rule = self._rule(prompt)
        if rule is None:
            raise StepFailed("no_rule", "no rule of the script fits this prompt")
        answer = rule.answer(self._turn(rule, prompt, seed))
        end_id = self.coder.end_id if answer.end else None
        ids = self.coder.answer_ids(answer)
        return Plan(len(prompt), rule, ids, end_id, [float(value) for value in answer.logprobs])

    def _turn(self, rule: Rule, prompt: tuple[int, ...], seed: int) -> int:
        """The number of this pair of prompt and seed among those of the rule."""
        index = next(index for index, one in enumerate(self._script.rules) if one is rule)
        turn = self._turns.get((prompt, seed))
        if turn is None:
            turn = self._turns[prompt, seed] = self._turns_of[index]
            self._turns_of[index] += 1
            _forget_oldest(self._turns)
        return turn


def _forget_oldest(remembered: OrderedDict[object, object]) -> None:
    while len(remembered) > REMEMBERED_MAX:
        remembered.popitem(last=False)
