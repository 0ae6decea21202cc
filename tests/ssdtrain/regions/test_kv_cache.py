"""Layers that are given an empty KV cache in training run again: [Note: KV caches] in
ssdtrain/regions/kvcaches.py."""

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import RegionError
from ssdtrain.regions.kvcaches import EmptyCache, EmptyCaches
from tests.ssdtrain.bits import same_bits

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
HYBRID: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}


def built(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "T5":
        config = transformers.T5Config(**T5)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        others = HYBRID if kind == "Bamba" else {}
        config = getattr(transformers, f"{kind}Config")(**SIZES, **others)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert config.use_cache
    return model.train()  # type: ignore[no-any-return]


def offloaded(model: nn.Module) -> Any:
    return ssdtrain.offload(model, plan="keep-all", recompute="regions", min_bytes=0)


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "Gemma2", "T5", "Bamba"])
def test_an_empty_cache_is_no_obstacle(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(kind)
    theirs = step(model)
    with (
        caplog.at_level(logging.WARNING),
        offloaded(model) as session,
    ):
        for _ in range(3):
            assert same_bits(step(model), theirs)
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0
        assert session.cache.regions.reasons == {}
    assert caplog.text.count("use_cache=False") == 1
    assert same_bits(step(model), theirs)


@pytest.mark.parametrize("kind", ["Llama", "T5"])
def test_an_empty_cache_does_not_say_how_long_it_is(kind: str) -> None:
    model, ids = built(kind), torch.ones(2, 8, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    with offloaded(model):
        cache = model(**given).past_key_values
        with pytest.raises(RegionError, match="asked for its length"):
            cache.get_seq_length()
        cache = getattr(cache, "self_attention_cache", cache)
        with pytest.raises(RegionError, match="asked for its length"):
            cache.get_seq_length(layer_idx=1)
        with pytest.raises(RegionError, match="asked for its length"):
            cache.get_mask_sizes(8, 1)
        assert cache.get_seq_length(2) == 0  # no layer has that one
        assert cache.get_mask_sizes(8, 2) == (8, 0)
        assert model(**given, use_cache=True).past_key_values.get_seq_length() == 8


@pytest.mark.parametrize("kind", ["Llama", "T5"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
def test_nor_does_its_copy(kind: str, copied: Callable[[Any], Any]) -> None:
    """Though the cache itself is gone."""
    model, ids = built(kind), torch.ones(2, 8, dtype=torch.int64)
    with offloaded(model):
        cache = copied(model(input_ids=ids, labels=ids).past_key_values)
    gc.collect()
    cache = getattr(cache, "self_attention_cache", cache)
    with pytest.raises(RegionError, match="asked for its length"):
        cache.get_seq_length()
    assert cache.get_mask_sizes(8, 2) == (8, 0)


def _moved(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    cache = kwargs["past_key_values"]
    return (args[0] + cache.get_seq_length(), *args[1:]), kwargs


def test_a_model_that_asks_between_its_layers() -> None:
    model = built("Llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(_moved, with_kwargs=True)
    theirs = step(model)
    with offloaded(model), pytest.raises(RegionError, match="asked for its length"):
        step(model)
    assert same_bits(step(model), theirs)


class Sampling(nn.Module):
    """Draws what it learns from, as models do that reinforce their own answers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("Llama")

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        given = {"max_new_tokens": 3, "do_sample": True, "eos_token_id": 63}
        drawn = self.inner.generate(input_ids, **given)
        return self.inner(input_ids=drawn, labels=drawn)


def test_what_is_generated_inside_of_a_forward_fills_a_cache() -> None:
    model = Sampling()
    theirs = step(model)
    with offloaded(model) as session:
        assert same_bits(step(model), theirs)
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0


class Drafting(nn.Module):
    """Reads a cache that nobody asked for, of a forward without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("Llama")
        self.num_drafted = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            drafted = self.inner(input_ids=input_ids)
        self.num_drafted = drafted.past_key_values.get_seq_length()
        return self.inner(input_ids=input_ids, labels=labels)


def test_a_forward_without_gradients_fills_a_cache() -> None:
    model = Drafting()
    theirs = step(model)
    expected, model.num_drafted = model.num_drafted, 0
    with offloaded(model):
        assert same_bits(step(model), theirs)
    assert model.num_drafted == expected > 0


class Continuing(nn.Module):
    """Asks for the cache of the model inside of it, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("Llama")

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        cache = self.inner(input_ids=input_ids, use_cache=True).past_key_values
        return self.inner(input_ids=input_ids, labels=labels, past_key_values=cache)


def test_a_model_inside_of_another_is_asked_for_its_cache() -> None:
    model = Continuing()
    theirs = step(model)
    with offloaded(model):
        assert same_bits(step(model), theirs)
        assert same_bits(step(copy.deepcopy(model)), theirs)
        assert same_bits(step(pickle.loads(pickle.dumps(model))), theirs)
    assert "forward" not in vars(model.inner)


class PassingBy(nn.Module):
    """As `Continuing`, with parts of the model inside of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.is_decoder = built(kind), kind == "Llama"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        import transformers

        others: dict[str, Any] = {}
        part = self.inner.model if self.is_decoder else self.inner.decoder
        if not self.is_decoder:
            read = self.inner.encoder(input_ids=input_ids).last_hidden_state
            others["encoder_hidden_states"] = read
        first = part(input_ids=input_ids, use_cache=True, **others)
        cache = first.past_key_values
        second = part(input_ids=labels, past_key_values=cache, **others)
        plain = self.inner(input_ids=input_ids, labels=labels)  # asks for none
        loss = second.last_hidden_state.square().mean() + plain.loss
        return transformers.utils.ModelOutput(loss=loss)


@pytest.mark.parametrize("kind", ["Llama", "T5"])
def test_a_part_of_a_model_inside_of_another_is_asked_for_its_cache(kind: str) -> None:
    model = PassingBy(kind)
    theirs = step(model)
    with offloaded(model) as session:
        for _ in range(2):
            assert same_bits(step(model), theirs)
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0


class Prefixed(nn.Module):
    """As prefix tuning: what a cache holds is part of what the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("Llama")
        draw = torch.Generator().manual_seed(3)
        self.states = [torch.randn(2, 2, 4, 8, generator=draw) for _ in range(2)]

    def forward(self, **given: Any) -> Any:
        import transformers

        cache = transformers.StaticCache(self.inner.config, max_cache_len=16)
        for layer in range(2):
            cache.update(*self.states, layer)
        return self.inner(**given, past_key_values=cache)


def test_a_cache_with_a_prefix_is_kept() -> None:
    model = Prefixed()
    theirs = step(model)
    assert not torch.equal(theirs[0], step(model.inner)[0])
    with offloaded(model):
        for _ in range(3):
            assert same_bits(step(model), theirs)


class Layer(nn.Module):
    """As those of state space models, it computes otherwise without a cache."""

    gradient_checkpointing = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.part, self.index = nn.Linear(8, 8), index

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        x = self.part(x)
        if past_key_values is not None:
            _, x = past_key_values.update(x.cos(), x.sin(), self.index)
        return x.tanh()


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        import transformers

        cache = transformers.DynamicCache()
        for layer in self.layers:
            x = layer(x, past_key_values=cache)
        return x


def one(model: nn.Module, x: Tensor) -> list[Any]:
    """The loss of a step, and its gradients."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def compare(model: nn.Module, x: Tensor) -> None:
    """Steps in which all layers run again are those of the model alone."""
    theirs = one(model, x)
    with offloaded(model) as session:
        for _ in range(3):
            assert same_bits(one(model, x), theirs)
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0


def test_a_layer_computes_what_it_does_with_a_cache() -> None:
    torch.manual_seed(0)
    compare(Cached(), torch.randn(1, 2, 4, 8))


@pytest.mark.parametrize("way", ["asked for", "given"])
def test_a_cache_that_the_caller_has_is_filled(way: str) -> None:
    """Its second chunk reads what the first one has written, and so does the loss."""
    import transformers

    model = built("Llama")
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(2))

    def one() -> list[Any]:
        model.zero_grad()
        cache = transformers.DynamicCache()
        asked = way == "asked for"
        given = {"use_cache": True} if asked else {"past_key_values": cache}
        first = model(input_ids=ids, labels=ids, **given)
        cache = first.past_key_values
        second = model(input_ids=ids, labels=ids, past_key_values=cache)
        loss = first.loss + second.loss + cache.layers[0].keys.square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    theirs = one()
    with offloaded(model):
        for _ in range(3):
            assert same_bits(one(), theirs)


def test_a_cache_that_stayed_empty_and_comes_back_is_an_error() -> None:
    model, ids = built("Llama"), torch.ones(2, 8, dtype=torch.long)
    with offloaded(model):
        first = model(input_ids=ids, labels=ids)
        with pytest.raises(RegionError, match="use_cache=True"):
            model(input_ids=ids, past_key_values=first.past_key_values)


class Looped(nn.Module):
    """Calls each layer twice, as HRM does, with one cache."""

    def __init__(self, step: int, *, by_position: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(2))
        self.step, self.by_position = step, by_position

    def forward(self, x: Tensor) -> Tensor:
        import transformers

        config = transformers.LlamaConfig(num_hidden_layers=4)
        cache = transformers.DynamicCache(config=config)
        x = x[:, None]
        for number in range(2):
            for index, layer in enumerate(self.layers):
                layer.index = index + number * self.step
                x = layer(x, cache) if self.by_position else self.named(layer, x, cache)
        return x

    def named(self, layer: nn.Module, x: Tensor, cache: Any) -> Tensor:
        return layer(x, past_key_values=cache)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_position", [False, True])
def test_a_layer_that_is_called_twice(by_position: bool) -> None:
    torch.manual_seed(0)
    model = Looped(2, by_position=by_position)
    x = torch.randn(2, 3, 4, 8)
    compare(model, x)
    model.step = 0
    with offloaded(model), pytest.raises(RegionError, match="use_cache=False"):
        one(model, x)


class Pair(nn.Module):
    """A question and its answer, by one decoder, which fills no cache by default."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Looped(2, by_position=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(x) * self.decoder(x.flip(0))
        return found


def test_a_model_that_is_called_twice_has_a_cache_each_time() -> None:
    torch.manual_seed(0)
    compare(Pair(), torch.randn(2, 3, 4, 8))


def change(how: str, cache: Any) -> None:
    own = cache.self_attention_cache
    if how == "filled":
        own.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), 1)
    elif how == "a layer more":
        own.layers.append(type(own.layers[0])())
    elif how == "a layer's setting":
        own.layers[1].is_compileable = True
    elif how == "a part's setting":
        own.offloading = True
    else:
        cache.is_updated[1] = True


@pytest.mark.parametrize(
    "how",
    ["filled", "a layer more", "a layer's setting", "a part's setting", "updated"],
)
def test_a_cache_is_looked_at_again_when_it_changes(how: str) -> None:
    import transformers

    config = transformers.T5Config(**T5)
    parts = [transformers.DynamicCache(config=config) for _ in range(2)]
    cache = transformers.EncoderDecoderCache(*parts)
    caches, layer = EmptyCaches(), Layer(0).train()
    first = caches.of(layer, (), {"past_key_values": cache})
    assert caches.of(layer, (), {"past_key_values": cache}) == first
    change(how, cache)
    again = caches.of(layer, (), {"past_key_values": cache})
    assert again != first
    assert bool(again) is (how != "filled")
    # What was seen first is what a layer that runs again is given.
    own = first["past_key_values"].copied()
    assert len(own.self_attention_cache.layers) == 2
    assert own.self_attention_cache.layers[1].get_seq_length() == 0
    assert not own.is_updated.get(1)
    assert not own.self_attention_cache.offloading


def test_another_threads_cache_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    caches, layer = EmptyCaches(), Layer(0).train()
    mine, other = ({"past_key_values": transformers.DynamicCache()} for _ in range(2))
    first, real = caches.of(layer, (), mine), EmptyCache.stands_for

    def stands_for(self: EmptyCache, cache: Any) -> bool:
        found = real(self, cache)
        monkeypatch.undo()
        caches.of(layer, (), other)  # between a look and what it is for
        return found

    monkeypatch.setattr(EmptyCache, "stands_for", stands_for)
    assert caches.of(layer, (), mine) == first


def test_copies_are_a_list_that_shares_nothing() -> None:
    import transformers

    cache = transformers.DynamicCache(config=transformers.LlamaConfig(**SIZES))
    empty = EmptyCaches().of(Layer(0), (), {"past_key_values": cache})[
        "past_key_values"
    ]
    own, other = empty.copied(), empty.copied()
    own.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), 1)
    assert own.layers[-1] is own.layers[1] is own.layers[0:2][1] is [*own.layers][1]
    assert [each.get_seq_length() for each in own.layers] == [0, 4]
    own.layers[0] = own.layers[1]
    own.layers.append(own.layers[1])
    del own.layers[1]
    assert [each.get_seq_length() for each in own.layers] == [4, 4]
    assert [each.get_seq_length() for each in other.layers] == [0, 0]
    assert [each.get_seq_length() for each in cache.layers] == [0, 0]
    with pytest.raises(IndexError):
        other.layers[2]


class Holder:
    states: dict[int, Tensor | None]
    layers: list["Holder"]


def test_states_in_dictionaries_are_copied_and_looked_at() -> None:
    """Layers of state space models hold theirs so."""
    cache, state = Holder(), Holder()
    state.states = {0: None}
    cache.layers = [state]
    caches, layer = EmptyCaches(), Layer(0).train()
    first = caches.of(layer, (), {"past_key_values": cache})["past_key_values"]
    own = first.copied()
    own.layers[0].states[0] = torch.ones(1)
    assert state.states == {0: None}
    assert first.copied().layers[0].states == {0: None}
    assert first.stands_for(cache)
    state.states[0] = torch.ones(1)
    assert not first.stands_for(cache)
    assert caches.of(layer, (), {"past_key_values": cache}) == {}
