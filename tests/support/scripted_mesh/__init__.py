"""A whole mesh that answers by a script: for tests of this server, and for anyone who tests a client.

The gateway is the real one, with its own HTTP server, and so are the nodes, their links, queues and session stores.
Only the model is missing: what the last node would compute stands in a file. So every answer and every fault comes
when the script says, over real HTTP, on a machine without weights and without torch::

    python -m tests.support.scripted_mesh --script FILE --port 8123 [--model FOLDER] [-- GATEWAY FLAGS]

It prints one line, ``ready http://127.0.0.1:8123/v1``, and serves until SIGTERM or Ctrl-C. ``--port 0`` lets the
system choose. In tests, `running_scripted_mesh` starts the same as a child process.

The script is JSON, version 1. A field that is not described here is refused with its path::

    {
      "version": 1,
      "model": {"name": "scripted", "context_len": 4096},
      "mesh": {"hops": 3, "replicas": 1, "sessions": 256},
      "gateway": ["--failover-timeout-seconds", "1"],
      "rules": [
        {"match": {"contains": "weather"},
         "answers": ["Sunny.", {"text": "Rain 🌧.", "split": "byte"}],
         "delay_s": 0.01,
         "faults": [{"at": 2, "hop": "first", "kind": "miss", "reason": "evicted"}]},
        {"match": {"any": true}, "answers": ["Hello."]}
      ]
    }

``rules`` (required)
    The first whose ``match`` fits the prompt answers it; a prompt that none fits is a server error (`no_rule`).

    ``match`` (required)
        On the rendered prompt, control tokens spelled out: ``{"contains": TEXT}``, ``{"regex": PATTERN}`` (Python's,
        searched, ``.`` matches line ends too) or ``{"any": true}``. Earlier turns are part of the prompt: a rule
        for a later turn stands before that of an earlier one.
    ``answers`` (required)
        Given in turn, from the first again after the last. A seed decides: each new pair of prompt and seed takes the
        next answer, and the same pair the same one again. Callers that name no seed have a fresh one per call. The
        choices of one call have different ones, and so different answers, in the order in which they begin. A string
        is short for ``{"text": STRING}``. Otherwise:

        ``text``, ``tokens`` or ``pieces``
            A text, in which control tokens such as ``<think>`` and ``<tool_call>`` are recognized; token ids; or
            texts each of which is tokenized alone, and so begins with a token of its own.
        ``split``
            How ``text`` becomes tokens: ``"model"``, as its tokenizer would (the default); ``"character"``, each
            character alone; ``"byte"``, a token for each byte of what is not a control token.
        ``end``
            Whether the end-of-turn token follows (the default). Without it the answer begins again after its last
            token, for ever.
        ``logprobs``
            Log-probabilities of the answer's tokens in order, ``"-inf"`` allowed; where there is none, ln 0.5.
    ``delay_s``, ``first_delay_s``
        What each token takes, and what the first takes on top. A node computes one step after the other, so delays of
        several streams add up.
    ``faults``
        Each ``{"at": N, "kind": KIND}``: what goes wrong where the answer's token N (from 0) is computed. Also:

        ``kind``
            ``"miss"``: the hop answers `cache_miss` and has forgotten the session. ``"error"``: it answers with an
            error. ``"drop_link"``: it closes its links; they are dialled again. ``"crash"``: it goes, and so do links
            and sessions. ``"stall"``: it answers heartbeats but not the step.
        ``hop``
            ``"first"``, ``"middle"``, ``"last"`` (the default), or a number from 0. A fault at 0 of a hop that is not
            the last comes with the prompt's first chunk, whose text alone is matched.
        ``times``
            How often it happens to each session, 1 by default; 0 is every time, which recovery cannot cure.
        ``reason``
            Of a miss: one of `shared.errors.CACHE_MISS_REASONS`, ``"evicted"`` by default. Of an error: its code,
            ``"internal_error"`` by default.
        ``for_s``
            Of a stall: how long, 600 by default. Of a crash: when it is back; absent is never.

``model``
    What is served where ``--model`` names no folder: ``name`` ("scripted"), ``context_len`` (4096), ``chat_template``
    (Jinja; by default ChatML with tools in ``<tool_call>`` and `enable_thinking`), ``end_tokens`` (["<|im_end|>"]),
    ``bos`` (false; true puts a ``<|begin_of_text|>`` before every text). Its tokenizer is a byte-level BPE, so any
    text can be scripted. With ``--model`` only ``name`` counts, and of the folder only tokenizer and configs are read.
``mesh``
    ``hops`` (3, at most 8), ``replicas`` (1, at most 4): nodes for each range; ``sessions`` (256): what each node
    holds at once.
``gateway``
    Flags for the gateway, as ``python -m gateway --help`` lists them. Those after ``--`` on the command line follow.

Log-probabilities are made up but consistent: an answer's token has its scripted one, the others share what is left,
each half of the one before. Those of a scored prompt and the numbers of an embedding follow from the ids alone. What a
sampler would do (penalties, biases, grammars, bans) is not done: the script is the model and its sampler.
"""

from __future__ import annotations

from tests.support.scripted_mesh.process import RunningMesh, running_scripted_mesh
from tests.support.scripted_mesh.script import Script, ScriptError, read_script

__all__ = ["RunningMesh", "Script", "ScriptError", "read_script", "running_scripted_mesh"]
