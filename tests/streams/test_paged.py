"""KV that arrives late in blocks is bit for bit the KV that was put there at once, whatever the blocks are."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import LayerExecutor, LayerPass
from kvlane.streams.paged_kv import PagedPool
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout
from kvlane.transfer.paged import BlockForm
from kvlane.transfer.shapes import LayerShape, TpShard

LAYERS, QUERY_HEADS, WIDTH, UNIT = 3, 4, 16, 16
STORED, WINDOW = 272, 70  # stored tokens: one more unit than a block of 256
KV_HEADS = {"mha": QUERY_HEADS, "gqa": 2}


def layout_of(kv_heads, dtype, window=None):
    full = LayerShape(kv_heads, WIDTH, WIDTH, dtype.itemsize)
    shapes = [full, replace(full, window=window), full] if window else [full] * LAYERS
    return KvLayout.of(shapes)


def made_kv(kv_heads, dtype, tokens=STORED):
    """Keys and values of every layer, [tokens, kv_heads, width] each."""
    random = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(tokens, kv_heads, WIDTH, generator=random).to(dtype) for _ in range(2))
        for _ in range(LAYERS)
    ]


def stored(layout, kv, form=None):
    identity = KvIdentity("model", "r1", None, "dtype", layout.name, 0, 1, "rope", "numerics")
    store = HostStore(UNIT, form=form, checksums=True)
    rows = [tuple(part.contiguous().view(torch.uint8).numpy().ravel() for part in layer) for layer in kv]
    assert store.put(identity, range(STORED), layout, rows) == STORED
    return store, store.lookup(identity, range(STORED))


def scattered(form, tokens, blocks):
    """A table for so many tokens: blocks in no order, some of them neighbours."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(form.tokens)).tolist()
    return order[: -(-tokens // form.tokens)]


def rows_of(sequence, layer, start, end):
    """The keys and values of tokens, [tokens, kv_heads, width], each row looked up by its own place in the pool."""
    parts = []
    for pool in sequence.blocks(layer):
        size = sequence.region.form.tokens
        parts.append(
            torch.stack([pool[sequence.region.table[t // size], :, t % size] for t in range(start, end)])
        )
    return parts


def attention(query, keys, values, window=None):
    """The new tokens' attention over all keys, masked to those at or before each and within the window."""
    new, held = query.shape[2], keys.shape[2]
    at, to = torch.arange(held - new, held)[:, None], torch.arange(held)[None]
    mask = (to <= at) if window is None else (to <= at) & (to > at - window)
    repeat = QUERY_HEADS // keys.shape[1]
    keys, values = (rows.repeat_interleave(repeat, 1) for rows in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


class LateBackend(CpuBackend):
    """Each layer's first copy begins late: what does not wait for it reads what was there before."""

    def __init__(self):
        super().__init__()
        self.layer = -1

    def _copy_piece(self, destination, source, piece):
        if piece.layer != self.layer:
            self.layer = piece.layer
            time.sleep(0.004)
        super()._copy_piece(destination, source, piece)


def late(backend, run, sequence, visit):
    """Load the run layer by layer into a sequence's blocks; `visit(layer)` is each layer's compute."""
    executor = LayerExecutor(backend)
    load = executor.submit([run], sequence.memory, sequence.region, mode="layered")
    steps = LayerPass(backend, LAYERS, load, backend.now())
    steps.before()
    for layer in range(LAYERS):
        steps.begin(layer)
        steps.ready(layer)
        visit(layer)
        steps.end(layer)
    steps.finish()
    timings = load.timings(0.0)
    load.close()
    executor.close()
    return timings


def name_of(form):
    return f"{form.first}-{form.order}-{form.kv}"


# One of each kind: packed as vLLM keeps it, in each block as FlashInfer does, keys and values apart as SGLang does, and
# all layers of a block together. The others are a matter of offsets, and `tests/transfer/test_paged.py` draws them.
FORMS = [
    BlockForm(16, "layer", "head", "packed"),
    BlockForm(16, "layer", "token", "in_block"),
    BlockForm(16, "layer", "token", "apart"),
    BlockForm(16, "block", "head", "in_block"),
]


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "windowed"])
@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_late_kv_is_the_kv_filled_at_once_and_so_is_the_attention_over_it(
    kit, dtype, heads, size, form, window
):
    form, kv_heads, new = replace(form, tokens=size), KV_HEADS[heads], 3
    kv, layout = made_kv(kv_heads, dtype), layout_of(kv_heads, dtype, window)
    store, hit = stored(layout, kv)
    random = torch.Generator().manual_seed(1)
    fresh = [torch.randn(1, kv_heads, new, WIDTH, generator=random).to(dtype) for _ in range(2)]
    query = torch.randn(1, QUERY_HEADS, new, WIDTH, generator=random).to(dtype)
    resident, room = 21, STORED + new  # the load begins and the new tokens end inside a block
    with LateBackend() as backend, store.open(hit, resident, STORED) as run:
        blocks = 2 * -(-room // size)
        pool = PagedPool(backend, layout, form, dtype, blocks)
        pool.memory.view(dtype).fill_(float("nan"))
        sequence = pool.sequence(scattered(form, room, blocks))
        for layer, rows in enumerate(kv):
            keys, values = (part[None, :resident].transpose(1, 2) for part in rows)
            sequence.write(layer, 0, keys, values)
        got = {}

        def visit(layer):
            sequence.write(layer, STORED, *fresh)
            got[layer] = attention(query, *sequence.gather(layer, room), window if layer == 1 else None)

        if window:
            # What was not loaded has to be something that a mask can take out: a NaN would stay one.
            for layer in range(LAYERS):
                blank = torch.zeros(1, kv_heads, STORED - resident, WIDTH, dtype=dtype)
                sequence.write(layer, resident, blank, blank)
        late(backend, run, sequence, visit)

        for layer, rows in enumerate(kv):
            bound = window if layer == 1 else None
            first = max(resident, STORED - bound) if bound else resident
            for found, part in zip(rows_of(sequence, layer, first, STORED), rows, strict=True):
                assert torch.equal(found, part[first:STORED])
            # The same attention over KV that was never in blocks nor late.
            keys, values = (
                torch.cat([part.transpose(0, 1)[None], n], 2) for part, n in zip(rows, fresh, strict=True)
            )
            assert torch.equal(got[layer], attention(query, keys, values, bound))
        free = [block for block in range(blocks) if block not in sequence.region.table]
        assert torch.isnan(torch.cat([part[free].ravel() for part in sequence.blocks(0)]).float()).all()
        assert run.bytes_moved == run.nbytes
    assert store.clear() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kv_that_is_not_waited_for_shows(dtype):
    """The control of the test above: without the wait its comparison fails."""
    kv, layout = made_kv(2, dtype), layout_of(2, dtype)
    store, hit = stored(layout, kv)
    with LateBackend() as backend, store.open(hit, 0, STORED) as run:
        pool = PagedPool(backend, layout, BlockForm(64), dtype, 10)
        sequence = pool.sequence(scattered(BlockForm(64), STORED, 10))
        executor = LayerExecutor(backend)
        load = executor.submit([run], sequence.memory, sequence.region, mode="layered")
        keys, values = rows_of(sequence, LAYERS - 1, 0, STORED)
        load.finish()
        load.close()
        executor.close()
        assert not (torch.equal(keys, kv[-1][0]) and torch.equal(values, kv[-1][1]))
        for found, part in zip(rows_of(sequence, LAYERS - 1, 0, STORED), kv[-1], strict=True):
            assert torch.equal(found, part)


@pytest.mark.parametrize("form", [form for form in FORMS if form.kv != "apart"], ids=name_of)
def test_out_of_a_store_in_the_same_form_a_block_is_one_copy(form):
    kv, layout = made_kv(2, torch.bfloat16), layout_of(2, torch.bfloat16)
    store, hit = stored(layout, kv, replace(form, first="block"))
    with LateBackend() as backend, store.open(hit, 0, STORED) as run:
        pool = PagedPool(backend, layout, form, torch.bfloat16, 40)
        sequence = pool.sequence(range(0, 34, 2))
        timings = late(backend, run, sequence, lambda layer: None)
        assert [row.copies for part in timings for row in part.layers] == [STORED // form.tokens] * LAYERS
        for layer, rows in enumerate(kv):
            for found, part in zip(rows_of(sequence, layer, 0, STORED), rows, strict=True):
                assert torch.equal(found, part)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_each_rank_gets_its_heads_out_of_a_store_of_all(form, size):
    kv, layout = made_kv(2, torch.bfloat16), layout_of(2, torch.bfloat16)
    store, hit = stored(layout, kv)
    for rank in range(size):
        shard = TpShard(size, rank)
        with CpuBackend() as backend, store.open(hit, 0, STORED, shard=shard) as run:
            pool = PagedPool(backend, layout.shard(shard), form, torch.bfloat16, 20)
            sequence = pool.sequence(scattered(form, STORED, 20))
            late(backend, run, sequence, lambda layer: None)
            heads = list(shard.heads(2))
            for layer, rows in enumerate(kv):
                for found, part in zip(rows_of(sequence, layer, 0, STORED), rows, strict=True):
                    assert torch.equal(found, part[:, heads])
            assert run.bytes_moved == run.nbytes == STORED * layout.shard(shard).bytes_per_token


def test_two_sequences_of_one_pool_keep_their_states_apart():
    dtype = torch.float32
    shapes = [LayerShape(state_bytes=40), LayerShape(2, WIDTH, WIDTH, 4), LayerShape()]
    layout = KvLayout.of(shapes)
    identity = KvIdentity("model", "r1", None, "dtype", layout.name, 0, 1, "rope", "numerics")
    keys, values = (part.view(torch.uint8).numpy().ravel() for part in made_kv(2, dtype)[0])
    empty = torch.empty(0, dtype=torch.uint8).numpy()
    states = torch.arange(80, dtype=torch.uint8)
    store = HostStore(UNIT)
    points = (128, STORED)
    store.put(
        identity,
        range(STORED),
        layout,
        [(empty, empty, states.numpy()), (keys, values), (empty, empty)],
        points,
    )
    with CpuBackend() as backend:
        pool = PagedPool(backend, layout, BlockForm(16), dtype, 40, state_slots=2)
        sequences = [pool.sequence(range(8), 0), pool.sequence(range(39, 8, -1), 1)]
        for sequence, end in zip(sequences, points, strict=True):
            with store.open(store.lookup(identity, range(STORED)), 0, end) as run:
                late(backend, run, sequence, lambda layer: None)
        for at, sequence in enumerate(sequences):
            assert torch.equal(sequence.state(0), states[40 * at : 40 * at + 40])
        with pytest.raises(InputError, match="no rows"):
            sequences[0].gather(0, 16)


def test_a_pool_refuses_what_it_cannot_hold():
    with CpuBackend() as backend:
        layout = layout_of(2, torch.float32)
        with pytest.raises(InputError, match="dtype"):
            PagedPool(backend, layout, BlockForm(16), torch.bfloat16, 4)
        pool = PagedPool(backend, layout, BlockForm(16), torch.float32, 4)
        with pytest.raises(InputError, match="table"):
            pool.sequence([0, 4])
        sequence = pool.sequence([3, 0])
        rows = torch.zeros(1, 2, 2, WIDTH)
        with pytest.raises(InputError, match="tokens"):
            sequence.write(0, 31, rows, rows)
