"""`imagemill.yaml`: without it preview models are used; errors in it are named.

Spec: docs/spec/conventions.md#command-line, docs/spec/conventions.md#configuration
"""

import pytest

from imagemill.config import TRANSFORMERS, read_config
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.domain.encoder_settings import PREVIEW
from imagemill.errors import MissingInput, WrongUsage


def write(tmp_path, text):
    path = tmp_path / "imagemill.yaml"
    path.write_text(text)
    return path


def test_absent_file_means_preview_models(tmp_path):
    config = read_config(tmp_path / "absent.yaml")

    assert config.encoder(VAE).model == PREVIEW
    assert config.model_threads >= 1


def test_named_file_that_is_absent_is_an_error(tmp_path):
    with pytest.raises(MissingInput):
        read_config(tmp_path / "absent.yaml", required=True)


def test_settings_of_one_kind_leave_the_others_alone(tmp_path):
    config = read_config(
        write(tmp_path, "encoders: {dinov3_npy: {model: a/b, revision: v1, dtype: bfloat16, batch_size: 64}}")
    )

    settings = config.encoder(DINOV3)
    assert (settings.model, settings.revision, settings.dtype, settings.batch_size) == ("a/b", "v1", "bfloat16", 64)
    assert config.encoder(VAE).model == PREVIEW


def test_default_hub_id_of_a_kind_brings_its_subfolder(tmp_path):
    """FLUX.1-dev has its VAE in a subfolder."""
    config = read_config(write(tmp_path, "encoders: {vae_latents: {model: black-forest-labs/FLUX.1-dev}}"))

    assert config.encoder(VAE).subfolder == "vae"


def test_near_duplicates_stay_in_the_shards_unless_the_file_says_otherwise(tmp_path):
    """ "It reports, and excludes from shards only when asked"."""
    settings = read_config(tmp_path / "absent.yaml").near_duplicates
    assert (settings.threshold, settings.exclude) == (0.97, False)

    settings = read_config(write(tmp_path, "near_duplicates: {threshold: 0.9, exclude: true}")).near_duplicates
    assert (settings.threshold, settings.exclude) == (0.9, True)


def test_summarizer_is_the_preview_model_and_greedy_and_the_captioner_off(tmp_path):
    """ "Greedy by default", "off by default". Spec: docs/spec/stage2.md#caption-sources"""
    config = read_config(tmp_path / "absent.yaml")

    assert (config.summarizer.kind, config.summarizer.model) == (TRANSFORMERS, PREVIEW)
    assert (config.summarizer.temperature, config.captioner.enabled) == (0, False)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("{refuse: 0.1}", "unknown filter 'refuse'"),
        ("{withdrawn: 0.1}", "unknown filter 'withdrawn'"),
        ("{refused: 1.5}", "limits.refused"),
    ],
)
def test_limit_is_a_share_of_a_filter(tmp_path, limits, said):
    with pytest.raises(WrongUsage, match=said):
        read_config(write(tmp_path, f"limits: {limits}"))
    assert read_config(write(tmp_path, "limits: {refused: 0.01}")).limits == {"refused": 0.01}


def test_prompt_files_are_relative_to_the_configuration_file(tmp_path):
    text = "summarizer: {prompts: {default: ask.txt, other: /a/b.txt}}\ncaptioner: {prompt: caption.txt}"
    config = read_config(write(tmp_path, text))

    assert config.summarizer.prompts == {"default": str(tmp_path / "ask.txt"), "other": "/a/b.txt"}
    assert config.captioner.prompt == str(tmp_path / "caption.txt")
    assert read_config(write(tmp_path, "captioner: {enabled: true}")).captioner.enabled


@pytest.mark.parametrize("kind", ["transformers", "module:Mine", "a.b.c:Mine"])
def test_summarizer_is_the_model_or_a_class(tmp_path, kind):
    assert read_config(write(tmp_path, f"summarizer: {{kind: '{kind}'}}")).summarizer.kind == kind


def test_value_that_a_setting_cannot_have_is_answered_with_those_that_it_can(tmp_path):
    """The message has what, where and the permitted values."""
    with pytest.raises(WrongUsage) as caught:
        read_config(write(tmp_path, "threads: 2\nencoders:\n  vae_latents: {dtype: bf16}\n"))

    assert str(caught.value) == (
        "imagemill.yaml line 3: encoders.vae_latents.dtype cannot be 'bf16'\n"
        f"  where: {tmp_path}/imagemill.yaml\n"
        "  do:    choose from auto, float32, bfloat16, float16, float64"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("summarizer: {modle: a/b}", "similar names: model"),
        ("encoders: {dinov3_npy: {batchsize: 4}}", "similar names: batch_size, batch_pixels"),
        ("captoiner: {enabled: true}", "similar names: captioner, captions"),
    ],
)
def test_unknown_setting_is_answered_with_similar_ones(tmp_path, text, why):
    with pytest.raises(WrongUsage) as caught:
        read_config(write(tmp_path, text))

    assert caught.value.why == why


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("encoders: {1: {}}", "a name cannot be 1"),
        ("licence: [a]", "expected text or nothing, got a list"),
        ("encoders: {vae: {}}", "vae"),
        ("encoders: {vae_latents: {dtpye: float32}}", "dtpye"),
        ("encoders: {vae_latents: {device: tpu}}", "tpu"),
        ("encoders: {vae_latents: {device: 'cuda:x'}}", "choose from auto, cpu, cuda, cuda:1, mps"),
        ("encoders: {vae_latents: {batch_size: 0}}", "batch_size"),
        ("threads: -1", "threads"),
        ("near_duplicates: {threshold: 1.1}", "threshold"),
        ("near_duplicates: {threshold: 0}", "threshold"),
        ("near_duplicates: {exclude: 1}", "exclude"),
        ("near_duplicates: {probes: 0}", "probes"),
        ("near_duplicates: {treshold: 0.9}", "treshold"),
        ("summarizer: {modle: a/b}", "modle"),
        ("summarizer: {kind: vllm}", "vllm"),
        ("summarizer: {kind: 'my module:Mine'}", "my module"),
        ("summarizer: {kind: 'module:'}", "module:"),
        ("summarizer: {batch_size: 0}", "batch_size"),
        ("summarizer: {max_new_tokens: 0}", "max_new_tokens"),
        ("summarizer: {temperature: -1}", "temperature"),
        ("summarizer: {top_p: 0}", "top_p"),
        ("summarizer: {prompts: ask.txt}", "prompts"),
        ("summarizer: {enabled: true}", "enabled"),
        ("captioner: {enabled: 1}", "enabled"),
        ("captioner: {kind: transformers}", "kind"),
        ("nonsense: 1", "nonsense"),
        ("- a list", "mapping"),
        ("{", "not YAML"),
    ],
)
def test_wrong_configuration_is_refused_and_named(tmp_path, text, named):
    with pytest.raises(WrongUsage, match=named):
        read_config(write(tmp_path, text))


@pytest.mark.parametrize("encoding", ["no-such", "hex", "undefined"])
def test_unknown_encoding_is_refused_before_a_text_is_read(tmp_path, encoding):
    with pytest.raises(WrongUsage, match=f"imagemill.yaml line 1: unknown encoding '{encoding}'"):
        read_config(write(tmp_path, f"captions: {{encoding: {encoding}}}"))


def test_known_encoding_is_accepted(tmp_path):
    assert read_config(write(tmp_path, "captions: {encoding: cp1252}")).chosen_inputs == {"encoding": "cp1252"}
