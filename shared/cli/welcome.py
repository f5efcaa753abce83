"""What `meshnet up` prints once it serves: what runs, and two ways to talk to it that work as pasted. Pure."""

from __future__ import annotations

from typing import Any

from shared.cli.plan import API_KEYS_VARIABLE, UpSettings

_CURL = """\
curl {base_url}/v1/chat/completions \\
  -H "content-type: application/json" \\
{auth}  -d '{{"model": "{model}", "stream": true, "temperature": 0.2,
       "messages": [{{"role": "user", "content": "Write a Python function that reverses a string."}}]}}'
"""

_PYTHON = """\
{imports}from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key={api_key})
stream = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Write a Python function that reverses a string."}}],
    temperature=0.2,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)

"""

_MODEL = "default"
"""Always answers, whatever other names the gateway was given."""


def ready_text(settings: UpSettings, mesh: dict[str, Any], elapsed_s: float) -> str:
    """The text.

    Args:
        settings: What was asked for.
        mesh: The answer to ``GET /mesh``.
        elapsed_s: Seconds since the command began.
    """
    nodes = mesh["nodes"]
    model = next((node["model_name"] for node in nodes if node.get("model_name")), settings.model)
    values = {
        "base_url": settings.base_url,
        "model": _MODEL,
        "auth": "",
        "api_key": '"not-needed"',
        "imports": "",
        **_keyed(len(settings.api_keys)),
    }
    plural = "node" if len(nodes) == 1 else "nodes"
    return "\n".join(
        [
            f"\nready after {elapsed_s:.1f} s: {model}, {mesh['num_layers']} layers on {len(nodes)} {plural}",
            *(_node_line(node) for node in nodes),
            f"\nbase_url  {settings.base_url}/v1",
            f"figures   {settings.base_url}/mesh",
            *([f"key       one of those in {API_KEYS_VARIABLE}; export it first"] if settings.api_keys else []),
            f"\n# --- in a shell\n{_CURL.format(**values)}",
            f"# --- in Python, after: pip install openai\n{_PYTHON.format(**values)}",
            "Ctrl-C ends every process.",
        ]
    )


def _keyed(keys: int) -> dict[str, str]:
    """What the snippets say so that they read a key from the variable; a key itself is never printed."""
    if not keys:
        return {}
    shell = f"${{{API_KEYS_VARIABLE}%%[, ]*}}" if keys > 1 else f"${API_KEYS_VARIABLE}"
    first = '.replace(",", " ").split()[0]' if keys > 1 else ""
    return {
        "auth": f'  -H "authorization: Bearer {shell}" \\\n',
        "api_key": f'os.environ["{API_KEYS_VARIABLE}"]{first}',
        "imports": "import os\n\n",
    }


def _node_line(node: dict[str, Any]) -> str:
    start, end = node["layers"]
    precision = node["dtype"] if node["quantize"] in (None, "none") else f"{node['dtype']}/{node['quantize']}"
    return f"  {node['id']:<8} layers {start:>3} to {end - 1:<3} {node['device']} {precision}, pid {node['pid']}"
