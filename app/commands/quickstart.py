"""``make run``: from a fresh environment to a served model and a request to paste.

Owns what happens around ``fairgate serve`` on the first day: the bundled model, a demo tenant with a key, and
the words that greet. Called by the Makefile, from the root of the checkout. Each part is made once; a
second start finds all of it. This process then becomes the gateway (exec), so that signals and exit code are
the gateway's own; a child waits until it is ready, greets and ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import ProxyHandler, build_opener

from ..engine.bundled import CHECKPOINT, BundledModelMissing, prepare
from ..settings import SettingsError, load_settings

if TYPE_CHECKING:
    from ..settings import Settings

DEMO = Path("config/demo.env")
"""The demo's settings. The environment wins over it: ``FAIRGATE_SERVER__PORT=9000 make run``."""

_GREET = "--greet"
_POLL_S = 0.2


def main() -> None:
    """Prepare, then serve; or, as the child, wait and greet."""
    try:
        settings = load_settings(os.environ, [DEMO]).settings
    except SettingsError as error:
        raise SystemExit(str(error)) from None
    if _GREET in sys.argv[1:]:
        _greet(settings)
        return
    if Path(settings.engine.model) == CHECKPOINT:
        try:
            prepare()
        except BundledModelMissing as error:
            raise SystemExit(str(error)) from None
    demo_key(settings.auth.tenants_file)
    # Not awaited: it ends by itself, with this process at the latest.
    subprocess.Popen([sys.executable, "-m", "app.commands.quickstart", _GREET])
    os.execv(sys.executable, [sys.executable, "-m", "app", "serve", "--env-file", str(DEMO)])


def demo_key(tenants_file: Path) -> str:
    """The demo tenant's key: made once, then kept beside the tenants file, for this user's eyes only.

    The gateway itself knows only its hash. If either file is gone, a new key is made.
    """
    kept = tenants_file.with_name("demo.key")
    if tenants_file.is_file() and kept.is_file():
        return kept.read_text(encoding="utf-8").strip()
    kept.parent.mkdir(parents=True, exist_ok=True)
    create = ["keys", "create", "--tenant", "demo", "--create-tenant", "--file", str(tenants_file)]
    made = subprocess.run(
        [sys.executable, "-m", "app", *create], stdout=subprocess.PIPE, text=True, check=True
    )
    key = made.stdout.strip()
    kept.unlink(missing_ok=True)
    with open(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(key + "\n")
    return key


def greeting(url: str, model: str, key: str, *, gpu: bool = False) -> str:
    """What is printed when the gateway is ready: requests to paste, and the way to a real model."""
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{model}", "temperature": 0, "messages": {messages}}}'
    lines = f"""
Fairgate is ready on {url} (Ctrl-C ends it). Paste this into another terminal:

curl {url}/v1/chat/completions \\
  -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
  -d {shlex.quote(body)}

or this into .venv/bin/python:

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
messages = {messages}
answer = client.chat.completions.create(model="{model}", temperature=0, messages=messages)
print(answer.choices[0].message.content)
"""
    if gpu:
        lines += """
This machine has a GPU. These three lines serve a real model on it, for the same tenant:

make install-cuda
export FAIRGATE_ENGINE__MODEL=Qwen/Qwen3-8B FAIRGATE_AUTH__TENANTS_FILE=.cache/fairgate/tenants.yaml
.venv-cuda/bin/fairgate serve
"""
    return lines


def has_gpu() -> bool:
    """Whether a CUDA GPU is there to be used: the driver's own tool lists one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def _greet(settings: Settings) -> None:
    scheme = "https" if settings.server.ssl_certfile else "http"
    url = f"{scheme}://127.0.0.1:{settings.server.port}"
    if not _becomes_ready(url):
        return
    names = settings.engine.served_model_name
    key = demo_key(settings.auth.tenants_file)
    print(greeting(url, names[0] if names else settings.engine.model, key, gpu=has_gpu()), flush=True)


def _becomes_ready(url: str) -> bool:
    """Wait until the gateway, our parent, answers requests. False if it ends before."""
    gateway = os.getppid()
    # A proxy of the environment's cannot reach this machine's own port.
    opener = build_opener(ProxyHandler({}))
    while os.getppid() == gateway:
        try:
            with opener.open(f"{url}/readyz", timeout=5):
                return True
        except OSError:
            # Refused while the port is closed, 503 while the engine loads.
            time.sleep(_POLL_S)
    return False


if __name__ == "__main__":
    main()
