//! Two ranks in two threads over one store: what one computes the other finds, and the bits are those of two
//! ranks without a cache.

use std::{
    ops::Range,
    path::Path,
    sync::{Arc, Barrier, Mutex},
    thread,
};

use coxswain_proto::{
    cache_plan::CacheDecision,
    ids::{Generation, Rank, Step},
    plan,
    run_spec::RunSpec,
};
use coxswain_worker::{
    collective::RingListener,
    link::{Assignment, Commands, Link, LinkError, Phase, Report, SoloLink, StepShare},
    trainer::TrainerOutcome,
};

use super::{BATCH, EPOCH, LinkRecord, Run, SAMPLES, UPPER_LAYERS, collected, outcome, solo, spec, trainer};

const WORLD: u32 = 2;

/// One rank of a world without a coordinator. Cache phases follow the schedule alone, so every rank may keep
/// a table of its own.
struct RankLink {
    cache_phases: SoloLink,
    rank: Rank,
    next: String,
    heard: Option<LinkRecord>,
}

impl RankLink {
    fn cut(&self, leased: StepShare, samples: u64) -> StepShare {
        let slice: Range<u64> = plan::slice(samples, self.rank, WORLD);
        StepShare { slice, ..leased }
    }
}

impl Link for RankLink {
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        let (rank, next) = (self.rank, self.next.clone());
        let alone = self.cache_phases.assignment(why)?;
        Ok(Assignment { generation: Generation(1), rank, world: WORLD, next, ..alone })
    }
    fn has_generations(&self) -> bool {
        false
    }
    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        self.cache_phases.lease(step, samples).map(|leased| self.cut(leased, samples))
    }
    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        Ok(self.cache_phases.lease_ahead(step, samples)?.map(|leased| self.cut(leased, samples)))
    }
    fn decided(&self, step: Step) -> Option<CacheDecision> {
        self.cache_phases.decided(step)
    }
    fn commands(&mut self) -> Commands {
        self.cache_phases.commands()
    }
    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.cache_phases.wait_while_paused()
    }
    fn at(&mut self, _phase: Phase, _step: Step) {}
    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        if let Some(heard) = &self.heard {
            heard.report(&report);
        }
        self.cache_phases.report(report)
    }
}

/// Trains two ranks from the checkpoint of `first_step`, or afresh, to the end; what is heard is rank 0's.
fn pair(spec: &RunSpec, first_step: u64) -> Run {
    let heard = LinkRecord::default();
    let (addresses, ready) =
        (Arc::new(Mutex::new(vec![String::new(); WORLD as usize])), Barrier::new(WORLD as usize));
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORLD)
            .map(|rank| {
                let (addresses, ready, heard) = (addresses.clone(), &ready, heard.clone());
                scope.spawn(move || {
                    let listener = RingListener::bind("127.0.0.1:0").expect("a free port");
                    addresses.lock().expect("unpoisoned")[rank as usize] = listener.address().to_owned();
                    ready.wait();
                    let next = addresses.lock().expect("unpoisoned")[((rank + 1) % WORLD) as usize].clone();
                    let heard = (rank == 0).then_some(heard);
                    outcome(&mut trainer(Some(listener)), spec, first_step, |cache_phases, _| {
                        Box::new(RankLink { cache_phases, rank: Rank(rank), next, heard })
                    })
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().expect("no rank panics"), TrainerOutcome::Done);
        }
    });
    collected(spec, &heard)
}

fn run(dir: &Path, name: &str, more: &[&str]) -> Run {
    let store = format!("cache.dir={}", dir.join("store").display());
    let steps = format!("train.steps={}", 2 * EPOCH);
    pair(&spec(&dir.join(name), &[&[steps.as_str(), &store, UPPER_LAYERS], more].concat()), 0)
}

#[test]
fn two_ranks_give_the_bits_of_two_ranks_without_a_cache_and_share_what_they_compute() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let off = run(dir.path(), "off", &[]);
    let cold = run(dir.path(), "cold", &["cache.mode=exact"]);
    let warm = run(dir.path(), "warm", &["cache.mode=exact"]);
    off.assert_same(&cold);
    off.assert_same(&warm);
    assert_eq!(cold.used(), (SAMPLES, SAMPLES), "over both ranks every sample is computed once");
    assert_eq!(warm.used(), (2 * SAMPLES, 0));
}

#[test]
fn two_ranks_take_turns_together() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let periodic =
        ["cache.mode=periodic", "cache.interval.steps=4", "cache.live.steps=2", "cache.probe_samples=5"];
    let cold = run(dir.path(), "cold", &periodic);
    let warm = run(dir.path(), "warm", &periodic);
    cold.assert_same(&warm);
    assert_eq!(cold.generations(), [0, 0, 1, 1, 0, 0, 2, 2]);
    assert_eq!(warm.used(), (4 * BATCH, 0));
    assert_eq!(cold.cache().drift, warm.cache().drift);
    assert_eq!(cold.cache().drift.len(), 1);
}

#[test]
fn another_world_goes_on_in_the_namespace_of_the_generation_that_it_finds() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let periodic =
        ["cache.mode=periodic", "cache.interval.steps=8", "cache.live.steps=2", "cache.probe_samples=5"];
    let every = ["train.steps=8", "train.checkpoint_every=1", "train.keep_checkpoints=99"];
    let spec = spec(dir.path(), &[&periodic[..], &every].concat());
    let alone = solo(&spec);
    assert_eq!(alone.used(), (6 * BATCH - SAMPLES, SAMPLES));
    for step in [3, 7] {
        let two = pair(&spec, step);
        assert_eq!(two.used(), ((8 - step) * BATCH, 0), "LoRA rests, so its digest is the one of step 2");
        for (a, b) in alone.summary.losses[step as usize..].iter().zip(&two.summary.losses) {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "two ranks add up in another order: {a} and {b}");
        }
    }
}
