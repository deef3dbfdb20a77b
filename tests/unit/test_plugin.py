"""Promise: installed but not asked for, vLLM is as if we were not there; asked for badly, it
says so before any weights are loaded."""

import importlib
import inspect
import json
import logging
import os
import pickle
import sys
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests import child
from tests.conftest import triforce
from tests.models import make_architecture, speculators_config
from tests.refusals import engine_config, refused
from vllm_triforce import plugin, vllm_patches
from vllm_triforce.config import checks
from vllm_triforce.config.keys import is_supported
from vllm_triforce.plugin import _AfterImport, register
from vllm_triforce.vllm_patches.cli_args import is_refusal, print_refusals_alone, refusing
from vllm_triforce.vllm_patches.patch import Patch

_PRINT_CONFIG = """
import sys
from importlib.metadata import entry_points
import vllm.plugins
import vllm.config
before, finders = set(sys.modules), list(sys.meta_path)
(plugin,) = entry_points(group=vllm.plugins.DEFAULT_PLUGINS_GROUP, name="triforce")
is_on = "PLUGIN_OFF" not in __import__("os").environ
if is_on:
    plugin.load()()
    assert set(sys.modules) - before == {"vllm_triforce", "vllm_triforce.plugin"}
from vllm.engine.arg_utils import EngineArgs
assert hasattr(EngineArgs.create_engine_config, "__wrapped__") == is_on
configs = [EngineArgs(m, skip_tokenizer_init=True).create_engine_config() for m in sys.argv[1:]]
import vllm.v1.engine.core, vllm.v1.core.sched.scheduler, vllm.v1.metrics.loggers
assert hasattr(vllm.v1.engine.core.EngineCore.post_step, "__wrapped__") == is_on
assert not is_on or "_AfterImport" not in [type(finder).__name__ for finder in sys.meta_path]
for config in configs:
    print(config.compute_hash())
    config.instance_id = ""
    print(repr(config), config.parallel_config.worker_cls, config.additional_config)
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
flags = {flag for flag in parser._option_string_actions if flag != "--speculative-model"}
abbreviations = {flag[:end] for flag in flags for end in range(3, len(flag)) if flag[:2] == "--"}
for short in sorted(abbreviations - flags):
    print(short, [found[1] for found in parser._get_option_tuples(short)])
keys = '{"method": "ngram", "num_speculative_tokens": 3}'
for given in (
    [], ["--speculative", keys], ["--speculative=" + keys], ["--speculative_c.method", "ngram"],
    ["--speculative.method=ngram", "--spec-t", "3"], ["-sc", keys, "-O2"], ["--spec_mo", "draft"],
):
    args = parser.parse_args(["--model", sys.argv[1], *given])
    print(vars(args), EngineArgs.from_cli_args(args))
"""


def test_inert_unless_asked_for(gqa_pair, tmp_path):
    """Configuration, compile key, parsed flags, all abbreviations, and log are the same with the
    plugin and without."""
    models = [gqa_pair["target"], make_architecture(tmp_path / "windows", "gemma3")]

    def run(plugins: dict) -> tuple[str, list[str]]:
        env = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **plugins}
        done = child.run(sys.executable, "-c", _PRINT_CONFIG, *models, env=env)
        lines = (done.stdout + done.stderr).splitlines()
        # The log's lines carry the time and the process.
        return [line.split("] ", 1)[-1] for line in lines if "Warning" not in line]

    with_plugin, without = run({}), run({"VLLM_PLUGINS": "", "PLUGIN_OFF": "1"})
    assert with_plugin == without
    assert "CPUWorker" in " ".join(with_plugin) and "triforce" not in " ".join(with_plugin)


@pytest.mark.parametrize(
    "gone, reason",
    [
        (None, "its version is 0.34.0"),
        ("vllm.engine.arg_utils.EngineArgs.from_cli_args", "wrapped: EngineArgs.from_cli_args"),
        ("vllm.v1.core.sched.scheduler.Scheduler", "wrapped: Scheduler.update_from_output"),
    ],
)
def test_another_vllm_is_left_alone(monkeypatch, gone, reason):
    """It logs one line with the supported versions, however often vLLM loads its plugins."""
    said = []
    plugin._warn_once.cache_clear()
    monkeypatch.setattr(Patch, "apply", lambda _: pytest.fail("wraps it"))
    logger = logging.getLogger("vllm.triforce")
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    if gone is None:
        monkeypatch.setattr("vllm.__version__", "0.34.0")
    else:
        monkeypatch.delattr(gone)
        with pytest.raises(ValueError, match=r"vllm-triforce wraps .*drop method='triforce'"):
            vllm_patches.install_in_engine()
    plugin.register()
    plugin.register()
    (line,) = said
    assert reason in line and "Install vLLM >=0.32.0, <0.34" in line


@pytest.mark.parametrize("is_first", [True, False])
def test_actions_run_once_after_the_import_that_they_wait_for(tmp_path, monkeypatch, is_first):
    """Beside finders of other packages: one asks all others, one has an older protocol."""

    class AsksOthers:
        def find_spec(self, name, path=None, target=None):
            others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
            specs = (other.find_spec(name, path, target) for other in others)
            return next((spec for spec in specs if spec), None) if "a_late" in name else None

    (tmp_path / "a_late_module.py").write_text(
        "import os\nif os.environ['LATE'] == 'fails':\n    raise RuntimeError('late')\nvalue = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    monkeypatch.setenv("LATE", "fails")
    after, ran = _AfterImport(), []

    def action():
        ran.append(sys.modules["a_late_module"].value)
        after.add("a_late_module", chained)  # loaded, though its import has not ended

    def chained():
        ran.append("chained")

    after.add("a_late_module", action)
    after.add("a_late_module", action)
    sys.meta_path.insert(1 if is_first else 0, AsksOthers())
    with pytest.raises(RuntimeError):
        importlib.import_module("a_late_module")
    assert not ran and importlib.util.find_spec("a_late_module") is not None
    monkeypatch.setenv("LATE", "loads")
    module = importlib.import_module("a_late_module")
    assert ran == [1, "chained"] and after not in sys.meta_path
    assert inspect.getsource(module).startswith("import os")
    after.add("a_late_module", action)
    assert ran == [1, "chained"] * 2 and after not in sys.meta_path
    del sys.modules["a_late_module"]


def test_a_refusal_by_the_server_is_its_last_line_alone(gqa_pair):
    command = (Path(sys.executable).parent / "vllm", "serve", gqa_pair["target"])
    options = ("--skip-tokenizer-init", "--spec-method", "triforce", "--spec-tokens", "200")
    done = child.run(*command, *options, code=1)
    *before, last = done.stderr.splitlines()
    assert last.startswith("vllm-triforce: error: --spec-tokens: num_speculative_tokens=200 is")
    assert "at most 128" in last
    assert not any("Traceback" in line or "triforce" in line for line in before), done.stderr


def test_errors_that_are_not_ours_are_printed_as_they_were(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: others.append(error))
    print_refusals_alone.cache_clear()
    print_refusals_alone()
    hook = sys.excepthook
    print_refusals_alone()
    assert sys.excepthook is hook
    with pytest.raises(ValueError) as raised, refusing():
        raise ValueError("gamma=0")
    hook(ValueError, raised.value, raised.tb)
    assert capsys.readouterr().err == "vllm-triforce: error: gamma=0\n" and not others
    error = (ValueError, ValueError("vLLM's"), None)
    hook(*error)
    assert others == [error] and not capsys.readouterr().err
    print_refusals_alone.cache_clear()


def argument_parser() -> FlexibleArgumentParser:
    register()
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def parsed(model: str, *flags: str):
    parser = argument_parser()
    assert "  TriForce  " in parser.format_help()
    return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))


TRIFORCE = ("--speculative-model", "triforce")


def test_the_flag_is_no_argument_of_scripts_that_do_not_give_it(gqa_pair):
    """They pass all arguments on, or have a flag of this name themselves."""
    parser = argument_parser()
    EngineArgs(**vars(parser.parse_args(["--model", gqa_pair["target"]])))
    parser = FlexibleArgumentParser()
    parser.add_argument("--speculative-model", default="theirs")
    assert EngineArgs.add_cli_args(parser).parse_args([]).speculative_model == "theirs"


@pytest.mark.parametrize("asked", [TRIFORCE, ("--spec-method", "triforce"), ()])
def test_vllms_own_flags(gqa_pair, asked):
    flags = ["--spec-model", gqa_pair["draft"], "--spec-tokens", "7", "--skip-tokenizer-init"]
    keys = {"min_context": 5}
    if not asked:
        keys["method"] = "triforce"
    args = parsed(gqa_pair["target"], *asked, *flags, "--speculative-config", json.dumps(keys))
    before = dict(vars(args))
    ours = args.create_engine_config().additional_config["triforce"]
    assert (ours["draft_model"], ours["num_speculative_tokens"]) == (gqa_pair["draft"], 7)
    assert ours["min_context"] == 5 and args.spec_tokens == 7
    assert args.speculative_config == before["speculative_config"]


@pytest.mark.parametrize(
    "flags, named",
    [
        ([*TRIFORCE, "--spec-tokens", "129"], "--spec-tokens: num_speculative_tokens=129 is out"),
        ([*TRIFORCE, "--spec-model", "/no/draft"], "--spec-model: draft model '/no/draft' is not"),
        ([*TRIFORCE, "--spec-method", "ngram"], "--spec-method 'ngram' exclude each other. Drop"),
        (
            [*TRIFORCE, "--spec-tokens", "5", "-sc", '{"num-speculative-tokens": 5}'],
            "--spec-tokens and --speculative-config['num_speculative_tokens'] are mutually",
        ),
        (
            ["--spec-method", "triforce", "-sc", '{"method": "ngram"}'],
            "--spec-method and --speculative-config['method'] are mutually exclusive",
        ),
        ([*TRIFORCE, "-sc", '{"method": "ngram"}'], "with method 'ngram' exclude each other. Drop"),
        (
            ["--spec-method", "triforce", "-sc", '{"rejection_sample_method": "typical"}'],
            "rejection_sample_method='typical' is not supported with method='triforce'",
        ),
        ([*TRIFORCE, "-sc", "[1, 2]"], "--speculative-config [1, 2] is not supported with --spec"),
        (["--spec-method", "triforce", "-sc", "[]"], "[] is not supported with --spec-method tri"),
    ],
)
def test_refusals_name_the_flag_that_was_given(gqa_pair, flags, named):
    with refused(named) as error:
        parsed(gqa_pair["target"], *flags).create_engine_config()
    text = str(error.value)
    assert is_refusal(error.value) and "\n" not in text
    assert "--spec-method: " not in text  # that value is right


def test_a_checkpoint_that_names_a_method_of_its_own_is_refused(gqa_pair, tmp_path):
    """vLLM takes that method and its model, whatever was configured."""
    head = dict(vocab_size=4096, num_hidden_layers=1, draft_vocab_size=4096)
    head["eagle_aux_hidden_state_layer_ids"] = None
    config = speculators_config(head, gqa_pair["target"])
    model = _config_only(tmp_path / "model", **config)
    with pytest.raises(ValueError, match=r"speculators.*'eagle3'.*Use the model .*target'"):
        engine_config(model, triforce())


def test_a_stock_engine_may_have_additional_config_of_our_name(gqa_pair):
    config = engine_config(gqa_pair["target"], additional_config={"triforce": {}})
    assert config.speculative_config is None


def test_a_draft_of_several_kinds_of_layers_is_refused(gqa_pair, tmp_path):
    draft = make_architecture(tmp_path / "draft", "gemma3")
    with pytest.raises(ValueError, match=r"kinds full_attention, sliding_attention.*lookup"):
        engine_config(gqa_pair["target"], triforce(model=draft))


def test_flag_reaches_api_servers_of_their_own(gqa_pair):
    """They make arguments with stock vLLM's method, before plugins load."""
    flags = [*TRIFORCE, "--speculative-config", '{"gamma": 3}']
    args = argument_parser().parse_args(["--model", gqa_pair["target"], *flags])
    EngineArgs.from_cli_args(args)
    stock = inspect.getattr_static(EngineArgs, "from_cli_args").__func__.__wrapped__
    sent = pickle.loads(pickle.dumps(args))
    assert stock(EngineArgs, sent).speculative_config == {"method": "triforce", "gamma": 3}
    assert EngineArgs.from_cli_args(sent).speculative_config == {"method": "triforce", "gamma": 3}


def test_an_empty_name_is_no_draft_model(gqa_pair):
    ours = engine_config(gqa_pair["target"], triforce(model="")).additional_config["triforce"]
    assert (ours["draft_model"], ours["draft_sources"]) == (None, "prompt_lookup")


@pytest.fixture
def logged(monkeypatch) -> list[tuple[str, str]]:
    """Collect levels and lines of the log while configurations are made."""
    from vllm_triforce.vllm_patches.engine_args import logger

    lines: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            logger, level, lambda text, *values, level=level: lines.append((level, text % values))
        )
    return lines


@pytest.mark.parametrize(
    "keys, line",
    [
        (
            {},
            "reads 1/8 of the context, 512 to 4,096 tokens, by selection 'retrieval'; level 1 "
            "drafts from prompt_lookup.",
        ),
        (
            {"selection": "quest", "retrieval_budget": 512},
            "reads 512 tokens by selection 'quest'; level 1 drafts from prompt_lookup.",
        ),
        ({"levels": "2,3"}, "by selection 'retrieval'; level 1 takes no part."),
        ({"model": "DRAFT", "adaptive": True}, "drafts from draft_model, prompt_lookup."),
        ({"levels": "1,3", "selection": "quest"}, None),
        (None, None),
    ],
)
def test_the_start_logs_level_2(gqa_pair, logged, keys, line):
    if keys is not None:
        keys = triforce(**keys | ({"model": gqa_pair["draft"]} if "model" in keys else {}))
    engine_config(gqa_pair["target"], keys)
    assert len(logged) == (line is not None)
    for level, text in logged:
        assert level == "info" and text.startswith("TriForce's level 2 ") and text.endswith(line)


@pytest.mark.parametrize(
    "settings, most",
    [
        ({}, 15),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 1024}, 3),
        ({"max_num_batched_tokens": 512, "performance_mode": "throughput"}, 1),
    ],
)
def test_with_adapters_proposals_are_as_long_as_vllm_lets_them_be(gqa_pair, settings, most):
    """vLLM with LoRA refuses a step without room for all tokens."""
    engine = dict(enable_lora=True, **settings)
    config = engine_config(gqa_pair["target"], {"method": "triforce"}, **engine)
    assert config.num_speculative_tokens == most
    assert config.additional_config["triforce"]["num_speculative_tokens"] == most
    keys = {"method": "triforce", "num_speculative_tokens": most + 1}
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        engine_config(gqa_pair["target"], keys, **engine)


@pytest.mark.parametrize("given, used", [(256, 384), (1000, 1024), (1024, 1024)])
def test_a_budget_that_does_not_fit_is_rounded_up_and_said(gqa_pair, logged, given, used):
    config = engine_config(gqa_pair["target"], triforce(retrieval_budget=given), block_size=128)
    assert config.additional_config["triforce"]["retrieval_budget"] == used
    warnings = [text for level, text in logged if level == "warning"]
    assert len(warnings) == (given != used)
    for text in warnings:
        assert f"={given} " in text and "128 tokens" in text and f"is {used}" in text


@pytest.mark.parametrize("given, used", [(None, 32), (64, 64)])
def test_block_size_that_the_user_chose_is_kept(gqa_pair, given, used):
    keys = triforce(**{"num-speculative-tokens": 5})
    config = engine_config(gqa_pair["target"], keys, block_size=given)
    assert config.cache_config.block_size == used
    assert config.additional_config["triforce"]["block_size"] == used
    assert config.num_lookahead_tokens == 5


def test_engine_args_can_be_used_twice(gqa_pair):
    keys = triforce()
    args = EngineArgs(gqa_pair["target"], speculative_config=keys, skip_tokenizer_init=True)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert first.additional_config == second.additional_config
    assert args.speculative_config == keys and args.additional_config == {}
    assert args.block_size is None


@pytest.mark.parametrize(
    "keys, kwargs, named",
    [
        ({"model": "/no/such/draft"}, {}, ["'/no/such/draft'", "config.json", "prompt lookup"]),
        ({"model": "no/such/draft"}, {}, ["'no/such/draft'", "config.json", "prompt lookup"]),
        ({"model": "nobody/no-such-draft"}, {}, ["'nobody/no-such-draft'", "cannot be read"]),
        ({"model": 3}, {}, ["model=3"]),
        ({"model": "DRAFT", "num_recent_tokens": 2000}, {}, ["num_recent_tokens=2000", "1024"]),
        ({"revision": "main"}, {}, ["revision", "no 'model'"]),
        ({}, {"pipeline_parallel_size": 2}, ["pipeline_parallel_size=2", "tensor parallelism"]),
        ({}, {"worker_cls": "my.Worker"}, ["'my.Worker'", "--worker-cls"]),
        ({}, {"kv_cache_dtype": "fp8_inc"}, ["'fp8_inc'", "kv_cache_dtype='auto'"]),
        ({}, {"enable_prompt_embeds": True}, ["enable_prompt_embeds=True is not supported"]),
        (
            {"rejection_sample_method": "block"},
            {},
            ["rejection_sample_method='block'", "Model Runner V1", "Leave it out"],
        ),
        ({}, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, ["skip_layers"]),
        ({}, {"logits_processors": ["json:JSONDecoder"]}, ["logits_processors"]),
        ({"kv_offload_gib": 1}, {}, ["kv_offload_gib=1 is not supported with Model Runner V1"]),
        (
            {},
            {"structured_outputs_config": {"backend": "lm-format-enforcer"}},
            ["'lm-format-enforcer' is not supported with method='triforce'"],
        ),
    ],
)
def test_bad_input_is_refused_before_weights_load(gqa_pair, keys, kwargs, named):
    if keys.get("model") == "DRAFT":
        keys = keys | {"model": gqa_pair["draft"]}
    with refused(*named):
        engine_config(gqa_pair["target"], triforce(**keys), **kwargs)


def test_a_platform_without_attention_is_refused_before_weights_load(gqa_pair, monkeypatch):
    """Before its worker, of which a user would learn less."""

    def refuse(platform):
        raise ValueError(f"{platform.device_name} has no attention")

    monkeypatch.setattr(checks, "check_platform", refuse)
    with pytest.raises(ValueError, match="cpu has no attention"):
        engine_config(gqa_pair["target"], triforce(), worker_cls="my.Worker")


@pytest.mark.parametrize("pins", [{}, {"revision": "abc"}, {"revision": "a", "code_revision": "b"}])
def test_a_pinned_draft_is_read_at_its_revision_only(gqa_pair, monkeypatch, pins):
    """Reading a config may run the code of the revision that it is read at."""
    from vllm.transformers_utils import config

    original, read = config.get_config, []

    def get_config(model, trust_remote_code, revision=None, code_revision=None, *args, **kwargs):
        if model == gqa_pair["draft"]:
            read.append((revision, code_revision))
        return original(model, trust_remote_code, None, None, *args, **kwargs)

    monkeypatch.setattr(config, "get_config", get_config)
    monkeypatch.setattr("vllm.config.model.get_config", get_config)
    engine_config(gqa_pair["target"], triforce(model=gqa_pair["draft"], **pins))
    assert len(read) >= 2  # by us, then by vLLM
    assert set(read) == {(pins.get("revision"), pins.get("code_revision"))}


def _config_only(folder, **config) -> str:
    """Write the config of a small model without weights."""
    size = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=512)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(size | config))
    return str(folder)


_LATENT = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16)
_WHISPER = dict(d_model=64, encoder_layers=1, decoder_layers=1, max_target_positions=448)
_WHISPER |= dict(encoder_attention_heads=4, decoder_attention_heads=4)


@pytest.mark.parametrize(
    "architecture, config, named",
    [
        (
            "DeepseekV2ForCausalLM",
            dict(model_type="deepseek_v2", **_LATENT),
            r"not supported on the CPU.*wrong tokens.*MLA\. Use a GPU",
        ),
        ("MambaForCausalLM", dict(model_type="mamba"), "not supported on the CPU.*state-space"),
        (
            "WhisperForConditionalGeneration",
            dict(model_type="whisper", **_WHISPER),
            "encoder-decoder",
        ),
    ],
)
def test_targets_that_are_refused(tmp_path, architecture, config, named):
    model = _config_only(tmp_path / "model", architectures=[architecture], **config)
    with pytest.raises(ValueError, match=named):
        engine_config(model, triforce(), max_model_len=None)


@pytest.mark.parametrize(
    "architecture, config, reason",
    [
        (
            "MistralForCausalLM",
            dict(model_type="mistral", sliding_window=128, intermediate_size=64),
            "each of its layers has a window of 128 tokens",
        ),
        (
            "FalconForCausalLM",
            dict(model_type="falcon", alibi=True),
            "layers with ALiBi stay dense",
        ),
    ],
)
def test_level_2_steps_aside(tmp_path, logged, architecture, config, reason):
    """The others speculate; who asks for level 2 is told why it takes no part."""
    model = _config_only(tmp_path / "model", architectures=[architecture], **config)
    vllm_config = engine_config(model, triforce(), max_model_len=None)
    assert vllm_config.additional_config["triforce"]["levels"] == "1,3"
    assert any(f"Level 2 takes no part: {reason}" in line for _, line in logged)
    for keys in (
        {"level2_model": "bfloat16"},
        {"retrieval_budget": 512},
        {"levels": "2,3"},
        {"selection": "quest"},
    ):
        (name,) = keys
        with pytest.raises(ValueError, match=rf"{name}=.*not supported with target.*{reason}"):
            engine_config(model, triforce(**keys), max_model_len=None)


@pytest.mark.parametrize(
    "version, supported",
    [
        *((version, True) for version in ("0.32.0", "0.32.0+cpu", "0.32.1.dev3+cpu", "0.33.0rc1")),
        *((version, False) for version in ("0.31.2", "0.34.0", "1.0", "dev")),
    ],
)
def test_versions(version, supported):
    assert is_supported(version) == supported
