from __future__ import annotations

import ast
import copy
import itertools
import platform
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch import nn

from ckptmove.simulation import loading as simulated_loading  # it imports torch
from ckptmove.simulation import targets  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import unsupported_operation  # of errors of torch


def test_the_module_of_the_target_answers_as_long_as_the_device_stands(mps):
    cuda = SimulatedDevice("cuda:3")
    before = dict(vars(torch.cuda)), dict(vars(torch.accelerator)), dict(vars(torch.backends.mps))
    with cuda:
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (4, 0)
        assert not torch.backends.mps.is_available()
        with mps:
            assert torch.backends.mps.is_available()
            assert torch.mps.device_count() == 1
            assert torch.mps.synchronize() is None
    assert (dict(vars(torch.cuda)), dict(vars(torch.accelerator)), dict(vars(torch.backends.mps))) == before


def test_a_target_is_meant_by_its_name_while_it_stands(cuda):
    for device in (SimulatedDevice("cuda:41"), cuda):
        first = targets.tag_of(torch.device(device.device.type))
        with device:
            assert targets.shown(targets.meant_by(device.target)) == device.device
        assert targets.meant_by(device.target) is None
        assert targets.meant_by(first) is None
        assert targets.meant_by(device.device) is None


@pytest.mark.usefixtures("cuda")  # has registered the restore functions
def test_no_package_of_another_has_its_priority():
    """torch compares two of one priority by their functions, and fails."""
    registered = [priority for priority, _, restore in torch.serialization._package_registry]
    assert registered.count(simulated_loading.BEFORE_OTHERS) == 1
    assert not isinstance(simulated_loading.BEFORE_OTHERS, int)


def test_a_target_without_a_module_in_torch_has_tensors_all_the_same():
    npu = SimulatedDevice("npu:0")
    with npu:
        assert npu.device_of(torch.ones(1, device=npu.device)) == "npu:0"


def test_no_call_of_the_targets_module_asks_for_a_driver(cuda):
    with cuda:
        for call in (
            torch.cuda.synchronize, torch.cuda.empty_cache, torch.cuda.ipc_collect, torch.cuda.init,
            torch.cuda.seed_all, torch.cuda.reset_peak_memory_stats, torch.accelerator.synchronize,
            torch.accelerator.empty_cache,
        ):  # fmt: skip
            assert call() is None
        for call in (torch.cuda.set_device, torch.cuda.manual_seed, torch.cuda.set_per_process_memory_fraction):
            assert call(0) is None
        assert (
            torch.cuda.memory_allocated(0) == torch.cuda.max_memory_allocated() == torch.accelerator.memory_allocated()
        )
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
        assert torch.cuda.memory_summary() == ""
        assert torch.cuda.mem_get_info(0)[1] == torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(cuda.device).name == "simulated"
        assert torch.cuda.get_device_capability(0) == (8, 0)
        assert torch.cuda.get_arch_list() == []
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.initial_seed() == torch.initial_seed()
        with torch.cuda.device(cuda.device), torch.cuda.device_of(torch.ones(1, device=cuda.device)):
            assert torch.cuda.current_device() == 0


def test_the_device_has_the_properties_of_torchs_own(cuda):
    stub = (Path(torch.__path__[0]) / "_C" / "__init__.pyi").read_text()
    kind = next(one for one in ast.parse(stub).body if getattr(one, "name", "") == "_CudaDeviceProperties")
    with cuda:
        found = vars(torch.cuda.get_device_properties(0))
    types = {"_int": int, "str": str}
    wanted = {one.target.id: types[one.annotation.id] for one in kind.body}
    assert {name: type(found[name]) for name in wanted} == wanted


def test_each_call_is_an_object_of_its_own(cuda):
    """`torch._dynamo` has one rule for each function, and raises for two names of one function."""
    with cuda:
        calls = [call for name, call in vars(torch.cuda).items() if getattr(call, "__name__", "") == "answer"]
    assert all(one != other for one, other in itertools.combinations(calls, 2))
    assert len(calls) > 20


REFUSED = {
    "on the device": (lambda device: torch.zeros(16, dtype=torch.uint8, device=device), TypeError, "torch.ByteTensor"),
    "of floats": (lambda _: torch.zeros(16), TypeError, "RNG state must be a torch.ByteTensor"),
    "no tensor": (lambda _: 3, TypeError, "expected a torch.ByteTensor"),
    "of the CPU": (lambda _: torch.get_rng_state(), RuntimeError, "RNG state is wrong size"),
    "of another length": (lambda _: torch.zeros(12, dtype=torch.uint8), RuntimeError, "RNG state is wrong size"),
    "with gaps": (lambda _: torch.zeros(32, dtype=torch.uint8)[::2], RuntimeError, "RNG state must be contiguous"),
}


@pytest.mark.parametrize(("state", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_a_random_state_that_no_gpu_takes_is_refused(cuda, state, kind, said):
    with cuda:
        there = torch.Generator(cuda.device)
        for taker in (torch.cuda.set_rng_state, there.set_state, lambda one: torch.cuda.set_rng_state_all([one])):
            with pytest.raises(kind, match=said):
                taker(state(cuda.device))


def test_random_states_are_as_long_and_as_many_as_those_of_the_target(cuda, mps):
    with cuda:
        states = torch.cuda.get_rng_state_all()
        assert [(state.dtype, state.device.type, len(state)) for state in states] == [(torch.uint8, "cpu", 16)]
        assert len(torch.Generator(cuda.device).get_state()) == 16
        torch.cuda.set_rng_state(torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(IndexError, match="tuple index out of range"):
            torch.cuda.set_rng_state_all(states * 4)
    with mps:
        state = torch.mps.get_rng_state()
        assert len(state) == 36
        torch.mps.set_rng_state(state)
        with pytest.raises(RuntimeError, match="RNG state is wrong size"):
            torch.mps.set_rng_state(torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.* reports that you have")  # as many devices as other tests have simulated
def test_random_states_of_the_device_are_given_and_taken_back(cuda):
    with cuda:
        states = torch.cuda.get_rng_state_all()
        drawn = torch.rand(3, device=cuda.device)
        torch.cuda.set_rng_state_all(states)
        assert torch.equal(torch.rand(3, device=cuda.device), drawn)
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))
        for kind in ({}, {"device_type": "cuda"}, {"device_type": "sim"}):
            before = torch.get_rng_state()
            with torch.random.fork_rng(**kind):
                torch.rand(3, device=cuda.device)
            assert torch.equal(torch.get_rng_state(), before)


def test_streams_and_events_have_nothing_to_wait_for(cuda):
    with cuda:
        stream, event = torch.cuda.Stream(cuda.device), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            made = torch.ones(2, device=cuda.device)
        assert stream.record_event(event) is event
        stream.wait_event(stream.record_event())
        torch.cuda.current_stream().wait_stream(stream)
        made.record_stream(torch.cuda.default_stream())
        event.record()
        event.synchronize()
        assert stream.query()
        assert event.query()
        assert event.elapsed_time(torch.cuda.Event()) == 0.0


def test_the_current_stream_is_the_default_one_unless_another_is_chosen(cuda):
    third = SimulatedDevice("cuda:3")
    with cuda, third:
        home, stream = torch.cuda.default_stream(), torch.cuda.Stream()
        assert (
            torch.cuda.current_stream() == torch.cuda.current_stream(-1) == home == torch.accelerator.current_stream()
        )
        assert torch.cuda.current_stream(0) != torch.cuda.default_stream(3)
        assert len({home, torch.cuda.default_stream(0), stream, torch.cuda.Stream(0)}) == 3
        assert home != 0
        there = torch.cuda.Stream("cuda:3", priority=-1)
        assert (there.device, there.device_index, there.priority) == (torch.device("cuda:3"), 3, -1)
        with torch.cuda.stream(stream), torch.cuda.stream(None), there as entered:
            assert entered is there == torch.cuda.current_stream()
            assert torch.cuda.current_device() == 3
            assert torch.cuda.current_stream(0) == stream
            made = []
            thread = threading.Thread(target=lambda: made.append(torch.cuda.current_stream(0)))
            thread.start()
            thread.join()
            assert made == [home]
        assert torch.cuda.current_stream() == home
        assert torch.cuda.current_device() == 0
        torch.cuda.set_stream(there)
        torch.cuda.set_stream(None)
        assert torch.cuda.current_stream() == there
        there.synchronize()
    with cuda:
        assert torch.cuda.current_stream(0) == home


def test_arguments_may_have_the_names_of_torch(cuda):
    with cuda:
        stream, home = torch.cuda.current_stream(device=cuda.device), {"device": cuda.device}
        torch.cuda.Event().record(stream=stream)
        torch.cuda.Stream(**home).wait_stream(stream=stream)
        with torch.cuda.stream(stream=stream):
            assert torch.cuda.get_device_name(**home) == torch.cuda.get_device_name()
        assert torch.cuda.get_device_capability(**home) == torch.cuda.get_device_capability()
        assert torch.equal(torch.cuda.get_rng_state(**home), torch.cuda.get_rng_state())


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.usefixtures("cuda")  # has registered the backend
def test_a_checkpoint_is_saved_on_the_cpu_when_the_backend_is_registered(tmp_path):
    """torch uses the streams of the backend's module to copy ahead."""
    tree = {"one": torch.ones(3), "two": torch.zeros(4)}
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=1 << 20))
    read = {name: torch.full_like(one, 2) for name, one in tree.items()}
    dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path))
    assert all(torch.equal(read[name], tree[name]) for name in tree)


def test_a_gradient_scaler_and_autocast_are_those_of_the_target(cuda):
    with cuda:
        model = nn.Linear(3, 2).to(cuda.device)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            loss = model(torch.ones(1, 3, device=cuda.device)).sum()
        before = model.weight.tolist()
        scaler.scale(loss).backward()
        assert torch.equal(model.bias.grad, torch.full((2,), 2.0, device=cuda.device))
        scaler.step(optimizer)
        scaler.update()
        assert model.weight.tolist() != before


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # that it is deprecated, or more
def test_a_scripted_module_is_moved_and_run(cuda):
    plain = nn.Linear(3, 2)
    with cuda:
        scripted = torch.jit.script(copy.deepcopy(plain)).to(cuda.device)
        made = scripted(torch.ones(1, 3, device=cuda.device))
    assert torch.equal(cuda.to_cpu(made), plain(torch.ones(1, 3)))
    assert isinstance(torch.jit.script(plain), torch.jit.ScriptModule)


def test_torchscript_that_was_off_stays_off(cuda):
    torch.jit._state.disable()
    try:
        with cuda:
            pass
        assert not torch.jit._state._enabled
    finally:
        torch.jit._state.enable()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["cuda", "cuda:0", {"cpu": "cuda:0"}, "itself"], ids=str)
def test_a_file_is_loaded_onto_the_device(cuda, tmp_path, zipped, where):
    path = tmp_path / "some.pth"
    whole = torch.arange(6.0)
    torch.save({"rows": whole[2:], "all": whole, "w": nn.Parameter(whole)}, path, _use_new_zipfile_serialization=zipped)
    with cuda:
        loaded = torch.load(path, map_location=cuda.device if where == "itself" else where, weights_only=True)
        assert {cuda.device_of(one) for one in loaded.values()} == {"cuda:0"}
        assert loaded["rows"].tolist() == [2.0, 3.0, 4.0, 5.0]
        loaded["all"].zero_()
        assert loaded["rows"].tolist() == [0.0] * 4
        assert torch.load(path, map_location="cpu", weights_only=True)["all"].device.type == "cpu"
        with pytest.raises(RuntimeError, match="don't know how to restore data location"):
            torch.load(path, map_location="nowhere", weights_only=True)
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda"):
        torch.load(path, map_location="cuda:0", weights_only=True)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "where", [lambda one, _: one.cuda(), lambda one, _: one.cuda(0).cuda(), lambda one, _: one.to(device="cuda:0")]
)
def test_a_storage_is_moved_to_the_device(cuda, tmp_path, zipped, where):
    path = tmp_path / "some.pth"
    whole = torch.arange(6.0)
    torch.save({"rows": whole[2:], "all": whole}, path, _use_new_zipfile_serialization=zipped)
    with cuda:
        loaded = torch.load(path, map_location=where, weights_only=True)
        assert {cuda.device_of(one) for one in loaded.values()} == {"cuda:0"}
        loaded["all"].zero_()
        assert loaded["rows"].tolist() == [0.0] * 4
        moved = whole.untyped_storage().cuda()
        assert moved.cuda() is moved
        assert moved.data_ptr() != whole.data_ptr()
        assert whole.untyped_storage().to(device="cpu").data_ptr() == whole.data_ptr()
        assert torch.storage._to is not torch._utils._to
    assert torch.storage._to is torch._utils._to


def test_a_simulated_mps_is_on_apple_silicon(mps):
    """Lightning asks for the processor before it uses mps."""
    before = platform.processor()
    with mps:
        assert platform.processor() == "arm"
    assert platform.processor() == before


def test_which_kind_of_device_a_tensor_is_on(cuda, mps):
    xpu = SimulatedDevice("xpu")
    for device in (cuda, mps, xpu):
        with device:
            made = nn.Parameter(torch.ones(1, device=device.device))
            kinds = {"cuda": made.is_cuda, "mps": made.is_mps, "xpu": made.is_xpu}
            assert [kind for kind, is_it in kinds.items() if is_it] == [device.target.partition(":")[0]]


def test_functions_of_mps_work_as_on_the_newest_macos(mps):
    with mps:
        assert torch.backends.mps.is_built()
        assert torch.backends.mps.is_macos_or_newer(15, 0)
        assert torch.backends.mps.is_macos13_or_newer(2)
        assert torch.backends.mps.get_core_count() == 1
        assert torch.backends.mps.get_name() == "simulated"
        assert torch.mps.recommended_max_memory() > torch.mps.current_allocated_memory()
        torch.mps.event.Event(enable_timing=True).record()
        torch.mps.profiler.start(mode="event")
        torch.mps.profiler.stop()
        with torch.mps.profiler.profile():
            pass
    assert torch.backends.mps.is_built() == torch.backends.mps.is_available()


CALLS_OF_A_DRIVER = {
    "_cuda_getCurrentBlasHandle": torch.cuda.current_blas_handle,
    "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),  # noqa: PLW0108  # replaced in the context
    "": lambda: torch.Event(device="cuda"),
}


@pytest.mark.parametrize(("name", "call"), CALLS_OF_A_DRIVER.items(), ids=CALLS_OF_A_DRIVER)
def test_calls_of_a_driver_are_limits_of_the_simulation(cuda, name, call):
    with cuda, pytest.raises((RuntimeError, AttributeError)) as raised:
        call()
    assert unsupported_operation(raised.value) == name


def test_the_versions_of_cuda_are_known_on_cuda_alone(cuda, mps):
    before = torch.version.cuda, torch.backends.cudnn.version()
    with cuda:
        assert int(torch.version.cuda.split(".")[0]) >= 12
        assert torch.backends.cudnn.version() > 90000
    with mps:
        assert (torch.version.cuda, torch.backends.cudnn.version()) == before
    assert (torch.version.cuda, torch.backends.cudnn.version()) == before


def traced(function="trace"):
    compiler = getattr(torch.jit, function)
    model = nn.Linear(4, 2).to("cuda")
    return compiler(model, *[torch.zeros(1, 4, device="cuda")] * (function == "trace"))


CALLS_OF_COMPILERS = {
    "torch.export.export": lambda: torch.export.export(nn.Linear(4, 2).to("cuda"), (torch.zeros(1, 4, device="cuda"),)),
    "torch.jit.trace(…).graph": lambda: traced().graph,
    "torch.jit.script(…).code": lambda: traced("script").code,
    "torch.jit.script(…).save": lambda: traced("script").save("never.pt"),
    "torch.jit.save": lambda: torch.jit.save(traced(), "never.pt"),
    "torch.jit.freeze": lambda: torch.jit.freeze(traced("script")),
    None: lambda: traced().no_such_attribute,
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "call"), CALLS_OF_COMPILERS.items(), ids=CALLS_OF_COMPILERS)
def test_what_torchscript_and_exports_need_is_a_limit_of_the_simulation(cuda, name, call):
    with cuda, pytest.raises((RuntimeError, AttributeError)) as raised:
        call()
    assert unsupported_operation(raised.value) == name


def test_an_error_that_is_raised_from_a_limit_is_one(cuda):
    def to_onnx():
        try:
            torch.export.export(nn.Linear(4, 2), (torch.zeros(1, 4),))
        except NotImplementedError as error:
            raise ValueError("no onnx") from error

    with cuda, pytest.raises(ValueError, match="onnx") as raised:
        to_onnx()
    assert unsupported_operation(raised.value) == "torch.export.export"


def test_an_attribute_that_a_module_of_the_user_lacks_is_the_users_fault(cuda):
    with cuda, pytest.raises(AttributeError) as raised:
        nn.Linear(4, 2).to("cuda").graph  # noqa: B018  # the attribute is to raise
    assert unsupported_operation(raised.value) is None


CALLS_OF_METAL = {
    "torch.mps.compile_shader": lambda: torch.mps.compile_shader("kernel void f() {}"),
    "getCurrentAllocatedMemory": torch._C._mps_currentAllocatedMemory,
}


@pytest.mark.parametrize(("name", "call"), CALLS_OF_METAL.items(), ids=CALLS_OF_METAL)
def test_calls_of_metal_are_limits_of_the_simulation(mps, name, call):
    with mps, pytest.raises((RuntimeError, AttributeError)) as raised:
        call()
    assert unsupported_operation(raised.value) == name
