"""`amoeba plan`: what fits, what does not and why, and what is taken; from headers alone."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.plan.machine import described_machine
from amoeba.plan.memory import Work, total
from amoeba.plan.model import read_facts
from amoeba.plan.plan import ERRORS, make_plan, read_plan, write_plan
from amoeba.plan.speed import hit_rate
from amoeba.precision.formats import FP8_128
from amoeba.stream.store.reading import Reader
from called import call
from selection import quick
from sparse_models import qwen3_30b, sparse_model
from tiny_models import build, token_ids

GIB = 2**30
ONE_CHAT = Work("generate", context=4096, batch=1)
TUNE = Work("finetune", context=1024, batch=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sparse_model(tmp_path_factory.mktemp("sparse") / "qwen3-30b", qwen3_30b())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Where its size does not matter: the other one has 18,000 tensors to read about."""
    folder = tmp_path_factory.mktemp("small") / "model"
    build("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def facts(folder):
    return read_facts(str(folder))


def plan_json(*words):
    result = call("plan", *words, "--json", code=None)
    return result, result.document


class TestTheModel:
    def test_headers_tell_the_sizes_of_qwen3_30b(self, facts):
        assert facts.expert_bytes("resident") == 54 * GIB
        assert facts.rest_bytes / GIB == pytest.approx(2.87, abs=0.01)
        assert facts.expert_bytes("mxfp4-weights") / GIB == pytest.approx(14.3, abs=0.1)
        assert facts.kv_numbers == 48 * 2 * 4 * 128
        assert facts.active_numbers / 1e9 == pytest.approx(3.05, abs=0.05)

    def test_no_weight_is_read(self, small, monkeypatch):
        def read(*_, **__):
            raise AssertionError("a weight was read")

        monkeypatch.setattr(Reader, "read", read)
        monkeypatch.setattr("safetensors.safe_open", read)
        _, document = plan_json(small, "--machine", "4090")
        assert document["candidates"]

    def test_a_configuration_alone_gives_the_same_sizes(self, folder, facts, tmp_path):
        qwen3_30b().save_pretrained(tmp_path)
        alone = read_facts(str(tmp_path))
        assert alone.expert_bytes("resident") == facts.expert_bytes("resident")
        assert (alone.rest_numbers, alone.active_numbers) == (facts.rest_numbers, facts.active_numbers)
        assert alone.scratch_bytes == pytest.approx(facts.scratch_bytes, rel=0.01)

    def test_before_downloading_its_experts_are_streamed_as_afterwards(self, facts, tmp_path):
        qwen3_30b().save_pretrained(tmp_path / "qwen3")
        path = tmp_path / "qwen3"
        best, then = (
            make_plan(each, described_machine("4090"), ONE_CHAT).best for each in (read_facts(str(path)), facts)
        )
        assert (best.placement, best.slots) == (then.placement, then.slots) == ("streamed", "46 of 128 slots")
        result, document = plan_json(path, "--machine", "4090")
        words = " ".join(result.stdout.split())
        assert f"first: hf download NAME --local-dir {path}" in words and then.first is None
        assert f"options: --vram {best.options['vram']} --ram {best.options['ram']}" in words
        assert document["candidates"][document["best"]]["first"] == f"hf download NAME --local-dir {path}"

    def test_a_file_of_the_folder_is_refused_without_reading_it(self, folder, monkeypatch):
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it was read"))
        result = call("plan", folder / "model.safetensors", code=2)
        assert "expected a folder or a GGUF file; got the file" in " ".join(result.stderr.split())

    def test_more_tokens_than_the_model_has_positions_are_refused(self, tmp_path):
        build("qwen3_moe", max_position_embeddings=128).config.save_pretrained(tmp_path)
        result = call("plan", tmp_path, "--machine", "4090", "--context", 50_000, code=2)
        assert "--context: expected at most 128" in " ".join(result.stderr.split())
        _, document = plan_json(tmp_path, "--machine", "4090")
        assert document["work"]["context"] == 128

    def test_a_hub_name_is_planned_by_its_configuration_and_headers(self, facts, monkeypatch):
        headers = SimpleNamespace(parameter_count={"BF16": 30_000_000_000})
        monkeypatch.setattr("amoeba.plan.model.load_config", lambda name, **_: qwen3_30b())
        monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda name: headers)
        found = read_facts("somebody/qwen3")
        assert found.expert_bytes("resident") == facts.expert_bytes("resident") and not found.files_here

    @quick(lambda family: family in ("qwen3_moe", "deepseek_v2", "qwen3_next", "mimo_v2_flash", "jamba"))
    @pytest.mark.parametrize(
        "family",
        [
            *("qwen3_moe", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "qwen3_next"),
            *("deepseek_v32", "mimo_v2_flash", "jamba", "minimax", "nemotron_h"),
        ],
    )
    def test_keys_values_and_states_are_counted_as_the_cache_holds_them(self, family, tmp_path):
        model = build(family)
        model.config.save_pretrained(tmp_path)
        with torch.no_grad():
            cache = model(input_ids=token_ids(1, 6), use_cache=True).past_key_values
        held = torch.utils._pytree.tree_leaves([vars(each) for each in (cache, *cache.layers)])
        floating = (each for each in held if isinstance(each, torch.Tensor) and each.is_floating_point())
        facts = read_facts(str(tmp_path))
        assert facts.kv_numbers * 6 * 4 + facts.state_bytes == sum(each.nbytes for each in floating)

    def test_states_of_all_rows_of_a_server_are_part_of_its_memory(self, tmp_path):
        build("qwen3_next").config.save_pretrained(tmp_path)
        facts, work = read_facts(str(tmp_path)), Work("serve", context=64, batch=32)
        lines = make_plan(facts, described_machine("h200"), work).best.lines
        (states,) = (line for line in lines if line.name == "recurrent states")
        assert states.bytes == 33 * facts.state_bytes > 0


class TestWhatIsBest:
    def test_a_model_that_fits_stays_as_it_is_without_an_option(self, facts):
        best = make_plan(facts, described_machine("h200"), ONE_CHAT).best
        assert (best.placement, best.numbers, best.options) == ("resident", "bfloat16", {})

    def test_on_24_gb_its_experts_are_streamed_and_not_rounded(self, facts):
        plan = make_plan(facts, described_machine("4090"), ONE_CHAT)
        assert (plan.best.placement, plan.best.error) == ("streamed", 0)
        assert int(plan.best.options["vram"]) < 24 * GIB
        assert plan.best.gpu_bytes <= 24 * GIB and plan.best.host_bytes <= 64 * GIB
        (resident,) = (each for each in plan.candidates if each.placement == "resident")
        assert "needs 57.6 GiB on the GPU" in resident.rejected
        assert any("--precision mxfp4" in words and times > 2 for words, times in plan.helps)

    def test_experts_are_rounded_where_nothing_else_fits(self, facts):
        other = replace(facts, why_not_streamed="its files are elsewhere")
        plan = make_plan(other, described_machine("4090").within(None, 16 * GIB), ONE_CHAT)
        assert plan.best.placement == "mxfp4-weights" and plan.best.error == ERRORS["mxfp4"]

    def test_where_nothing_fits_it_says_what_would_make_it_fit(self, facts):
        other = replace(facts, why_not_streamed="its files are elsewhere")
        plan = make_plan(other, described_machine("4090").within(4 * GIB, 4 * GIB), ONE_CHAT)
        assert plan.best is None
        assert ("16 GiB more GPU memory", None) in plan.helps
        plan = make_plan(facts, described_machine("h200"), Work("train", context=256, batch=8))
        assert plan.best is None
        assert ("4 such GPUs that share the experts (--ranks 4)", None) in plan.helps

    def test_ranks_are_named_only_to_commands_and_checkpoints_that_run_over_them(self, facts):
        small = described_machine("4090").within(16 * GIB, 4 * GIB)
        for model, purpose, named in (
            (facts, "finetune", True),
            (facts, "serve", False),
            (facts.quantised(FP8_128), "finetune", False),
        ):
            plan = make_plan(replace(model, why_not_streamed="elsewhere"), small, Work(purpose, context=512, batch=1))
            assert any("--ranks" in words for words, _ in plan.helps) is named

    def test_where_only_the_gpu_is_too_small_the_cpu_alone_is_named(self, facts):
        plan = make_plan(facts, described_machine("4090").within(2 * GIB, 200 * GIB), ONE_CHAT)
        assert plan.best is None and ("--device cpu", None) in plan.helps
        (streamed, *_) = (each for each in plan.candidates if each.placement == "streamed" and not each.error)
        assert streamed.slots == "1 of 128 slots" and "GiB on the GPU; 1.94 GiB can be used" in streamed.rejected

    def test_where_nothing_fits_a_quantised_checkpoint_that_would_is_named(self, facts):
        plan = make_plan(facts, described_machine("4090").within(4 * GIB, 4 * GIB), ONE_CHAT)
        assert plan.best is None
        assert any("amoeba quantise" in words and times is None for words, times in plan.helps)

    def test_fine_tuning_takes_checkpointing_before_it_rounds(self, facts):
        best = make_plan(facts, described_machine("4090"), TUNE).best
        assert best.error == 0 and best.options["gradient_checkpointing"] is True

    def test_a_training_run_keeps_its_experts_and_shares_them_over_ranks(self, facts):
        work = Work("train", context=4096, batch=1, ranks=16, nodes=2)
        plan = make_plan(facts, described_machine("h100"), work)
        assert {each.placement for each in plan.candidates} == {"ranks"}
        one = make_plan(facts, described_machine("h100"), replace(work, ranks=1, nodes=1))
        assert plan.candidates[0].gpu_bytes < one.candidates[0].gpu_bytes / 4 and one.best is None
        within = make_plan(facts, described_machine("h100"), replace(work, nodes=1)).candidates[0]
        assert plan.candidates[0].speed.exchange_seconds > 2 * within.speed.exchange_seconds > 0

    @settings(max_examples=25, deadline=None)
    @given(vram=st.integers(4, 80), more=st.integers(0, 40))
    def test_more_memory_is_never_slower(self, facts, vram, more):
        machine = described_machine("4090")
        few, many = (
            make_plan(facts, machine.within(size * GIB, None), ONE_CHAT, helps=False).best
            for size in (vram, vram + more)
        )
        if few is not None:
            assert many is not None and many.speed.score >= 0.999 * few.speed.score


class TestMemory:
    def test_it_grows_with_context_batch_and_rank(self, facts):
        machine = described_machine("h200")

        def peak(work):
            return make_plan(facts, machine, work, helps=False).candidates[0].gpu_bytes

        assert peak(ONE_CHAT) < peak(replace(ONE_CHAT, context=32768)) < peak(replace(ONE_CHAT, context=32768, batch=4))
        assert peak(TUNE) < peak(replace(TUNE, rank=32)) < peak(replace(TUNE, rank=32, batch=16))

    def test_the_kv_cache_is_that_of_the_decoder(self, facts):
        (cache,) = (
            line for line in make_plan(facts, described_machine("h200"), ONE_CHAT).best.lines if line.name == "KV cache"
        )
        assert cache.bytes == 4096 * 48 * 2 * 4 * 128 * 2

    def test_loading_and_running_do_not_add_up(self, facts):
        found = make_plan(facts, described_machine("4090"), ONE_CHAT).candidates
        (packed,) = (each for each in found if each.placement == "cpu-bf16")
        of = {
            when: sum(line.bytes for line in packed.lines if line.when == when and line.where == "cpu")
            for when in ("always", "loading", "running")
        }
        assert total(packed.lines, "cpu") == of["always"] + max(of["loading"], of["running"])


@given(experts=st.sampled_from([8, 32, 128, 256]), top_k=st.integers(1, 8), slots=st.integers(0, 255))
def test_hit_rates_rise_with_slots_up_to_one(experts, top_k, slots):
    slots = min(slots, experts - 1)
    assert 0 <= hit_rate(slots, experts, top_k) <= hit_rate(slots + 1, experts, top_k) + 1e-9 <= 1 + 2e-9
    assert hit_rate(experts, experts, top_k) == 1


class TestTheFile:
    def test_a_command_gets_the_options_of_the_best(self, facts, tmp_path):
        plan = make_plan(facts, described_machine("4090"), ONE_CHAT)
        write_plan(tmp_path / "plan.json", plan)
        for purpose in ("generate", "serve"):
            assert read_plan(tmp_path / "plan.json", purpose)["options"] == plan.best.options
        with pytest.raises(ValueError, match="a plan for finetune; got one for generate"):
            read_plan(tmp_path / "plan.json", "finetune")

    @pytest.mark.parametrize("text", ["", "[]", '{"document": "amoeba verify"}'])
    def test_another_file_is_refused(self, tmp_path, text):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match="a file that amoeba plan wrote"):
            read_plan(tmp_path / "plan.json", "generate")


class TestTheCommand:
    def test_it_prints_a_table_and_what_would_help(self, folder):
        result, document = plan_json(folder, "--machine", "4090", "--context", 8192)
        assert result.exit_code == 0
        assert document["best"] == 0 and document["candidates"][0]["placement"] == "streamed"
        assert document["machine"]["source"] == "public figures" and "ram_bytes" in document["machine"]["assumed"]
        for words in ("what would help", "KV cache", "public figures", " on the GPU; "):
            assert words in result.stdout, words

    def test_of_a_store_that_does_not_fit_it_says_what_the_least_needs(self, tmp_path):
        build("qwen3_moe").save_pretrained(tmp_path / "model")
        call("pack", tmp_path / "model")
        words = ("--machine", "4090", "--vram", 0, "--ram", "200MiB", "--out", tmp_path / "plan.json")
        said = call("plan", tmp_path / "model.store", *words, code=1).said
        assert "streamed, 1 of 6 slots" in said and "of host memory; 180 MiB can be used" in said
        assert "nothing fits" in said and "pass --plan" not in said

    def test_a_machine_can_be_described_by_a_file(self, small, tmp_path):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({"card": "4090", "ram_bytes": "16GiB", "link": 12e9}))
        _, document = plan_json(small, "--machine", path)
        assert (document["machine"]["ram_bytes"], document["machine"]["link"]) == (16 * GIB, 12e9)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--for", "dance"), "--for: expected one of generate, serve, finetune, train"),
            (("--machine", "9999"), "--machine: expected one of 3060, 3090"),
            (("--ranks", "3", "--nodes", "2"), "a multiple of --nodes 2"),
            (("--context", "0"), "--context: expected at least 1"),
            (("--vram", "much"), "--vram: expected a size in bytes"),
        ],
    )
    def test_bad_options_are_refused_in_a_sentence(self, folder, words, said):
        result = call("plan", folder, *words, code=2)
        assert said in result.stderr

    def test_what_no_command_could_run_is_refused(self, tmp_path):
        build("qwen3_moe").save_pretrained(tmp_path / "model")
        call("quantise", tmp_path / "model", "--format", "mxfp8", "--out", tmp_path / "codes")
        call("pack", tmp_path / "model", "--out", tmp_path / "store")
        content = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "alone").mkdir()
        content["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        (tmp_path / "alone" / "config.json").write_text(json.dumps(content))
        for name, words, said in (
            ("codes", ("--for", "train"), "expected parameters that can all be trained; got experts in mxfp8"),
            ("store", ("--for", "train"), "expected a model's folder, with --for train; got a store"),
            ("store", ("--ranks", 2), "expected a model's folder, with --ranks; got a store"),
            ("codes", ("--ranks", 2), "--ranks: expected an unquantised checkpoint; got experts in mxfp8"),
            ("model", ("--for", "serve", "--ranks", 2), "--ranks: expected --for generate, finetune or train"),
            ("alone", (), "got qwen3_moe quantised by gptq, and no files"),
        ):
            assert said in call("plan", tmp_path / name, "--machine", "4090", *words, code=2).said

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_gpu_memory_without_a_gpu_is_refused_before_anything_is_measured(self, small, monkeypatch):
        monkeypatch.setattr("amoeba.plan.machine.measured_machine", lambda **_: pytest.fail("measured"))
        assert "--vram: expected a machine with a GPU" in call("plan", small, "--vram", "4GiB", code=2).said

    def test_a_preset_is_planned_before_it_has_files(self):
        result, document = plan_json("demo", "--for", "train", "--machine", "4090")
        assert result.exit_code == 0 and document["candidates"][document["best"]]["placement"] == "resident"


def test_a_batch_that_does_not_fit_is_divided_and_not_rounded(facts):
    wide = replace(TUNE, batch=16, checkpointing=True)
    other, card = replace(facts, why_not_streamed="elsewhere"), described_machine("h200")
    whole = make_plan(other, card, wide).best
    assert whole.micro_batches == 1
    best = make_plan(other, card.within(whole.gpu_bytes, None), wide).best
    assert best.micro_batches > 1 and best.error == 0
    assert best.options["batch_size"] * best.options["accumulation"] == 16


def test_gradients_of_factors_are_not_there_while_a_model_is_loaded(facts):
    found = make_plan(facts, described_machine("h200"), TUNE).candidates
    lines = next(each.lines for each in found if each.placement == "mxfp4-weights")
    assert {line.when for line in lines if line.name in ("LoRA factors", "gradients", "optimizer")} == {"running"}


def test_a_hub_name_without_a_network_is_refused_after_one_request(monkeypatch):
    from huggingface_hub import constants

    from amoeba.integrations import model_folder

    requests: list[str] = []

    class Session:
        def head(self, url, timeout):
            requests.append(url)
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    model_folder._offline_without_hub.cache_clear()
    for command in (["plan", "a/model"], ["generate", "a/model", "Once"], ["chat", "a/model"]):
        ended = call(*command, code=2)
        assert "'a/model': no such folder here, not downloaded before, and no answer from" in ended.said
    assert requests == [constants.ENDPOINT], "huggingface_hub does not repeat it, and knows that it is offline"
    model_folder._offline_without_hub.cache_clear()
