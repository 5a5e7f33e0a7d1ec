//! Frozen blocks shared out over ranks: the same bits as from blocks that are held, in worlds of any size,
//! with ranks that do different things, and with ranks that are gone.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::*;
use coxswain_models::pretrained::{blocks::InMemory, frozen::FrozenBytes};
use coxswain_nn::sharded::{Cut, Fetch, HeldParts, NoPeers, Peers};

const LANGUAGE: &str = r".*language_model.*(q_proj|up_proj)";
const TOP: &str = r".*language_model\.layers\.[45]\..*(q_proj|down_proj)";

fn lora(targets: &str) -> (&'static str, Value) {
    ("lora", json!({"rank": 2, "targets": targets}))
}

fn recompute(mode: &str) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode}))
}

fn weights(dtype: &str) -> (&'static str, Value) {
    ("model", json!({"path": MODEL, "weights_dtype": dtype}))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The ranks of a world, all in this process, asked without a network.
struct World {
    held: Vec<Arc<dyn HeldParts>>,
    lost: Mutex<BTreeSet<usize>>,
    /// Bytes that came from other ranks.
    came: AtomicU64,
}

impl Peers for World {
    fn fetch(&self, block: usize, wanted: &mut [Fetch<'_>], goes_on: &dyn Fn() -> bool) {
        let (world, lost) = (self.held.len(), self.lost.lock().expect("no rank panics with it").clone());
        for wanted in wanted.iter_mut().filter(|wanted| !lost.contains(&wanted.rank)) {
            let cut = Cut { rank: wanted.rank, world };
            let Some(part) = self.held[wanted.rank].part(block, cut) else { continue };
            let mut part: &[u8] = (*part).as_ref();
            assert_eq!(part.len(), wanted.len(), "both ranks cut alike");
            self.came.fetch_add(part.len() as u64, Ordering::Relaxed);
            for place in &mut wanted.places {
                let (chunk, rest) = part.split_at(place.len());
                place.copy_from_slice(chunk);
                part = rest;
            }
            wanted.came = true;
            if !goes_on() {
                return;
            }
        }
    }
}

fn held(fixture: &Fixture) -> Arc<dyn HeldParts> {
    Arc::new(fixture.policy.model().shared_blocks().expect("its blocks are shared out"))
}

fn share_out(fixture: &Fixture, cut: Cut, peers: Arc<dyn Peers>) {
    fixture.policy.model().share_out(cut, &peers).expect("the files are sound");
}

/// As many ranks with their parts.
fn world_of(ranks: &[Fixture]) -> Arc<World> {
    let held = ranks.iter().map(held).collect();
    let world = Arc::new(World { held, lost: Mutex::default(), came: AtomicU64::new(0) });
    for (rank, fixture) in ranks.iter().enumerate() {
        share_out(fixture, Cut { rank, world: ranks.len() }, world.clone());
    }
    world
}

fn sharded(changes: &[(&str, Value)]) -> Fixture {
    shaken(&spec(&[changes, &[("memory", json!({"shard": "frozen"}))]].concat()))
}

#[test]
fn sharing_out_changes_no_bit_of_loss_gradient_or_sample_in_any_world() {
    for (targets, mode, dtype, sizes) in [
        (EVERYWHERE, "full", "float32", &[1, 2, 3][..]),
        (LANGUAGE, "selective", "float32", &[2]),
        (TOP, "full", "float32", &[4]),
        (EVERYWHERE, "full", "bfloat16", &[1, 2]),
    ] {
        let changes = [lora(targets), recompute(mode), weights(dtype)];
        let whole = shaken(&spec(&changes));
        let batch = batch(&[0, 1, 2]);
        let sample = |fixture: &Fixture| {
            bits(&fixture.policy.sample_actions(&fixture.trainables, &batch, 1).expect("a sound batch"))
        };
        let due = (whole.run(&batch), sample(&whole));
        for &size in sizes {
            let ranks: Vec<_> = (0..size).map(|_| sharded(&changes)).collect();
            let world = world_of(&ranks);
            for fixture in &ranks {
                assert!((fixture.run(&batch), sample(fixture)) == due, "{size} {targets} {mode} {dtype}");
            }
            assert_eq!(world.came.load(Ordering::Relaxed) > 0, size > 1, "{size}");
        }
    }
}

#[test]
fn a_rank_that_is_gone_is_made_up_for_by_the_files() {
    let changes = [lora(EVERYWHERE), recompute("full")];
    let due = shaken(&spec(&changes)).run(&batch(&[0, 2]));
    let ranks: Vec<_> = (0..3).map(|_| sharded(&changes)).collect();
    let world = world_of(&ranks);
    for lost in [vec![1], vec![1, 2], vec![]] {
        *world.lost.lock().expect("no rank panics with it") = lost.iter().copied().collect();
        let before = world.came.load(Ordering::Relaxed);
        assert!(ranks[0].run(&batch(&[0, 2])) == due, "without {lost:?}");
        assert_eq!(world.came.load(Ordering::Relaxed) > before, lost.len() < 2, "without {lost:?}");
    }
}

#[test]
fn before_the_ranks_are_known_and_when_they_change_the_bits_are_the_same() {
    let changes = [lora(EVERYWHERE), recompute("full")];
    let due = shaken(&spec(&changes)).run(&batch(&[1]));
    let fixture = sharded(&changes);
    assert!(fixture.run(&batch(&[1])) == due, "all of it from the files");
    for (rank, world) in [(1, 2), (0, 1), (2, 4)] {
        share_out(&fixture, Cut { rank, world }, Arc::new(NoPeers));
        assert!(fixture.run(&batch(&[1])) == due, "rank {rank} of {world}");
        let part = |world| held(&fixture).part(3, Cut { rank, world });
        assert!(part(world).is_some() && part(world + 1).is_none());
    }
}

#[test]
fn kept_features_are_the_same_from_shared_blocks_while_other_ranks_compute_none() {
    let exact = ("cache", json!({"mode": "exact", "tap": {"layer": 3}}));
    let changes = [lora(TOP), recompute("full"), exact];
    let whole = shaken(&spec(&changes));
    let ranks: Vec<_> = (0..2).map(|_| sharded(&changes)).collect();
    world_of(&ranks);
    let batch = batch(&[0, 1, 2]);
    let features = |fixture: &Fixture| {
        fixture.policy.features_below(&fixture.trainables, &batch).expect("a sound batch")
    };
    let kept = features(&whole);
    assert_eq!(bits(&kept.values), bits(&features(&ranks[0]).values));
    let cached = MicroBatch { pixel_values: vec![], features: Some(kept), ..batch.clone() };
    assert!(whole.run(&cached) == ranks[1].run(&cached));
}

#[test]
fn parts_add_up_to_the_blocks_and_two_blocks_are_gathered_at_most() {
    let changes = [lora(EVERYWHERE), recompute("full")];
    for size in [1, 2, 3, 7] {
        let ranks: Vec<_> = (0..size).map(|_| sharded(&changes)).collect();
        world_of(&ranks);
        let model = ranks[0].policy.model();
        let bytes = FrozenBytes::of(&model.outline().tensors(), |tensor| 4 * tensor.elements as u64);
        let part = |rank: usize| -> u64 {
            let parts = (0..).map_while(|block| held(&ranks[rank]).part(block, Cut { rank, world: size }));
            parts.map(|part| (*part).as_ref().len() as u64).sum()
        };
        let parts: Vec<u64> = (0..size).map(part).collect();
        let all: u64 = bytes.towers.iter().flatten().sum();
        assert_eq!(parts.iter().sum::<u64>(), all);
        for (rank, part) in parts.iter().enumerate() {
            let predicted = bytes.in_memory(InMemory::Part(Cut { rank, world: size }));
            let gathered = if size > 1 { bytes.two_blocks() } else { 0 };
            let planned = predicted - bytes.outside - gathered;
            // Each of a block's 12 tensors is cut by itself, into equal chunks but for the last, which may
            // lack as many elements as there are ranks.
            let off = 4 * size as u64 * 12 * bytes.towers.iter().flatten().count() as u64;
            assert!(part.abs_diff(planned) <= off, "rank {rank} of {size}: {part} held, {planned} planned");
        }
        ranks[0].run(&batch(&[0]));
        let most = ranks[0].policy.most_streamed();
        let expected = if size > 1 { bytes.two_blocks() } else { 0 };
        assert!(most <= expected && (most > 0) == (size > 1), "{most} of {expected}");
    }
}

#[test]
fn the_report_says_what_a_rank_holds_of_shared_blocks() {
    let changes = [lora(EVERYWHERE), recompute("full")];
    let ranks: Vec<_> = (0..2).map(|_| sharded(&changes)).collect();
    world_of(&ranks);
    let rows = ranks[1].policy.trainable_report(ranks[1].trainables.layout(), Default::default());
    assert_eq!(rows[2].module, "sharded");
    let bytes =
        FrozenBytes::of(&ranks[1].policy.model().outline().tensors(), |tensor| 4 * tensor.elements as u64);
    let frozen: u64 = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
    assert_eq!(frozen, bytes.in_memory(InMemory::Part(Cut { rank: 1, world: 2 })));
}
