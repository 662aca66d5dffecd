"""lm-eval's `local-completions` on tasks of a folder: choices by likelihood, whole texts, generated answers.

Prints each sample's responses as JSON, for the test to compare with transformers' own.
"""

import json
import os
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

model_folder, task_folder = sys.argv[1:]
settings = {
    "model": "smollm2",
    "base_url": f"{os.environ['CONDUCTOR_URL']}/v1/completions",
    "tokenizer": model_folder,
    "num_concurrent": 4,
    "max_retries": 1,
    "max_length": 2048,
}
names = [path.stem for path in sorted(Path(task_folder).glob("*.yaml"))]
found = simple_evaluate(
    "local-completions",
    model_args=settings,
    tasks=names,
    task_manager=TaskManager(include_path=task_folder, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
    batch_size=4,
)
samples = {
    name: [{"doc": sample["doc"], "resps": sample["filtered_resps"]} for sample in found["samples"][name]]
    for name in names
}
print(json.dumps({"samples": samples, "results": found["results"]}, default=str))
