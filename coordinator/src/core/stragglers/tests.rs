use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    ids::Bytes,
    report::{CacheUse, Skip, SkipCause, StepTimes, Totals},
};

use super::*;

/// Numbers that look random: SplitMix64 (Steele, Lea, Flood 2014).
struct Noise(u64);

impl Noise {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Mean 0, variance 1, by the central limit theorem.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// Seconds of one rank's step.
#[derive(Clone, Copy)]
struct Times {
    data: f64,
    compute: f64,
    optimizer: f64,
}

const CALM: Times = Times { data: 0.002, compute: 0.250, optimizer: 0.010 };

/// A machine whose times scatter by 5 %, correlated from step to step, whose every hundredth step takes three
/// times as long, and which now and then is half as fast for five steps: a page cache that is written back,
/// another job that starts. As long passes before that comes again: a machine that is half as fast in most of
/// 20 steps is slow, and not calm.
struct Machine {
    noise: Noise,
    drift: f64,
    /// Steps of a burst that are left; below 0, steps since the last one.
    burst: i32,
}

/// Steps of a burst, and between two.
const BURST: i32 = 5;

impl Machine {
    fn new(seed: u64) -> Self {
        Self { noise: Noise(seed), drift: 0.0, burst: -BURST }
    }

    fn factor(&mut self) -> f64 {
        const SIGMA: f64 = 0.05;
        const CORRELATED: f64 = 0.3;
        let fresh = SIGMA * (1.0f64 - CORRELATED * CORRELATED).sqrt() * self.noise.normal();
        self.drift = CORRELATED * self.drift + fresh;
        if self.noise.unit() < 0.002 && self.burst <= -BURST {
            self.burst = BURST;
        }
        let spike = if self.noise.unit() < 0.01 { 3.0 } else { 1.0 };
        let burst = if self.burst > 0 { 2.0 } else { 1.0 };
        self.burst -= 1;
        self.drift.exp() * spike * burst
    }
}

fn report(step: u64, times: Times, samples: u64, tokens: u64) -> StepReport {
    let seconds = Duration::from_secs_f64;
    let communication = seconds(0.05);
    let own = seconds(times.data + times.compute + times.optimizer);
    StepReport {
        generation: Generation(1),
        step: Step(step),
        epoch: 0,
        positions: vec![0..samples],
        totals: Totals::default(),
        times: StepTimes {
            total: own + communication,
            data: seconds(times.data),
            optimizer: seconds(times.optimizer),
            communication,
        },
        metrics: Arc::default(),
        tokens,
        memory_peak: Bytes(0),
        retries: 0,
        cache_generation: 0,
        cache: CacheUse::default(),
        skipped: None,
    }
}

fn scaled(times: Times, by: f64) -> Times {
    Times { data: by * times.data, compute: by * times.compute, optimizer: by * times.optimizer }
}

/// Steps of a noisy world in which the ranks take these times; what was told, with the step.
fn run(
    machines: &mut [Machine],
    steps: std::ops::Range<u64>,
    times: impl Fn(u32) -> Times,
) -> Vec<(u64, SlownessChange)> {
    let mut stragglers = Stragglers::new(Generation(1), machines.len(), Step(steps.start));
    go_on(&mut stragglers, machines, steps, times)
}

fn go_on(
    stragglers: &mut Stragglers,
    machines: &mut [Machine],
    steps: std::ops::Range<u64>,
    times: impl Fn(u32) -> Times,
) -> Vec<(u64, SlownessChange)> {
    let mut told = Vec::new();
    for step in steps {
        for (rank, machine) in (0..).zip(machines.iter_mut()) {
            let times = scaled(times(rank), machine.factor());
            let changes = stragglers.observe(Rank(rank), &report(step, times, 8, 4096));
            told.extend(changes.into_iter().map(|change| (step, change)));
        }
    }
    told
}

fn machines(world: u64, seed: u64) -> Vec<Machine> {
    (0..world).map(|rank| Machine::new(1_000_003 * seed + rank)).collect()
}

/// Seeds on which thresholds were chosen; others name a rank now and then, as often as
/// `docs/decisions/wrong-ranks.md` says.
#[test]
fn ten_thousand_calm_steps_name_no_rank() {
    for (world, seeds) in [(2, 8), (3, 6), (8, 3), (64, 1)] {
        for seed in 0..seeds {
            let told = run(&mut machines(world, seed), 0..10_000, |_| CALM);
            assert!(told.is_empty(), "{world} ranks, seed {seed}: {told:?}");
        }
    }
}

#[test]
fn a_rank_that_is_slowed_by_a_third_is_named_within_twenty_steps_with_what_is_slow() {
    let slow = [
        (Part::Compute, Times { compute: 0.250 + 0.3 * 0.262, ..CALM }),
        (Part::Data, Times { data: 0.002 + 0.3 * 0.262, ..CALM }),
        (Part::Optimizer, Times { optimizer: 0.010 + 0.3 * 0.262, ..CALM }),
    ];
    for world in [2, 3, 8, 64] {
        for seed in 0..50 {
            for (part, times) in slow {
                let (from, who) = (100 + seed, (seed % world) as u32);
                let mut stragglers = Stragglers::new(Generation(1), world as usize, Step(0));
                let mut machines = machines(world, seed);
                let calm = go_on(&mut stragglers, &mut machines, 0..from, |_| CALM);
                assert!(calm.is_empty(), "{calm:?}");
                let times = |rank: u32| if rank == who { times } else { CALM };
                let told = go_on(&mut stragglers, &mut machines, from..from + 20, times);
                let case = format!("{world} ranks, seed {seed}, {part}: {told:?}");
                let [(_, SlownessChange { rank, slow: Some(slow) })] = told[..] else { panic!("{case}") };
                assert_eq!(rank, Rank(who), "{case}");
                // In the step that names it, a burst may be most of the window.
                assert_eq!(stragglers.slow(rank).map(|slow| slow.part), Some(part), "{case}");
                assert!((1.2..1.4).contains(&slow.factor), "{case}");
            }
        }
    }
}

#[test]
fn a_rank_that_was_slow_from_the_beginning_is_named_within_twenty_steps() {
    let times = |rank: u32| if rank == 1 { scaled(CALM, 1.3) } else { CALM };
    for seed in 0..50 {
        let told = run(&mut machines(4, seed), 0..20, times);
        assert!(
            matches!(told[..], [(_, SlownessChange { rank: Rank(1), slow: Some(_) })]),
            "seed {seed}: {told:?}"
        );
    }
}

#[test]
fn a_rank_that_keeps_up_again_is_told_once() {
    for seed in 0..20 {
        let mut machines = machines(4, seed);
        let mut stragglers = Stragglers::new(Generation(1), 4, Step(0));
        let slow = |rank: u32| if rank == 2 { scaled(CALM, 1.5) } else { CALM };
        go_on(&mut stragglers, &mut machines, 0..200, slow);
        assert!(stragglers.slow(Rank(2)).is_some());
        let told = go_on(&mut stragglers, &mut machines, 200..220, |_| CALM);
        assert!(
            matches!(told[..], [(_, SlownessChange { rank: Rank(2), slow: None })]),
            "seed {seed}: {told:?}"
        );
        assert_eq!(stragglers.slow(Rank(2)), None);
    }
}

#[test]
fn more_work_is_not_slowness() {
    let mut samples = Stragglers::new(Generation(1), 2, Step(0));
    let mut tokens = Stragglers::new(Generation(1), 2, Step(0));
    for step in 0..100 {
        // Five samples against four; and as many samples with longer prompts.
        assert_eq!(samples.observe(Rank(0), &report(step, scaled(CALM, 1.25), 5, 500)), []);
        assert_eq!(samples.observe(Rank(1), &report(step, CALM, 4, 400)), []);
        assert_eq!(tokens.observe(Rank(0), &report(step, scaled(CALM, 1.5), 4, 600)), []);
        assert_eq!(tokens.observe(Rank(1), &report(step, CALM, 4, 400)), []);
    }
}

#[test]
fn steps_that_cannot_be_compared_do_not_count() {
    let mut stragglers = Stragglers::new(Generation(1), 2, Step(0));
    for step in 0..100 {
        let slow = report(step, scaled(CALM, 2.0), 4, 400);
        let slow = match step % 3 {
            0 => StepReport { retries: 1, ..slow },
            1 => StepReport { skipped: Some(Skip { cause: SkipCause::Loss, samples: Vec::new() }), ..slow },
            _ => StepReport { cache: CacheUse { misses: 1, ..CacheUse::default() }, ..slow },
        };
        assert_eq!(stragglers.observe(Rank(0), &slow), []);
        assert_eq!(stragglers.observe(Rank(1), &report(step, CALM, 4, 400)), []);
    }
}

#[test]
fn what_is_repeated_or_of_another_generation_changes_nothing_and_what_is_missing_is_let_go() {
    let mut stragglers = Stragglers::new(Generation(1), 2, Step(0));
    let stale = StepReport { generation: Generation(2), ..report(5, CALM, 4, 400) };
    stragglers.observe(Rank(0), &stale);
    assert!(stragglers.open.is_empty());
    stragglers.observe(Rank(0), &report(5, CALM, 4, 400));
    stragglers.observe(Rank(0), &report(6, CALM, 4, 400));
    // Step 5 of rank 1 was reported to an earlier life of the coordinator.
    stragglers.observe(Rank(1), &report(6, CALM, 4, 400));
    assert!(stragglers.open.is_empty());
    assert_eq!(stragglers.recent.len(), 1);
    stragglers.observe(Rank(0), &report(6, CALM, 4, 400));
    assert!(stragglers.open.is_empty(), "it is told again and known");
}

#[test]
fn a_rank_alone_is_compared_with_nothing() {
    let mut stragglers = Stragglers::new(Generation(1), 1, Step(0));
    for step in 0..100 {
        assert_eq!(stragglers.observe(Rank(0), &report(step, CALM, 4, 400)), []);
    }
    assert!(stragglers.open.is_empty());
}

#[test]
fn the_median_of_others_leaves_ones_own_out() {
    let medians_of_others = |own: &[f64]| {
        let row: Vec<_> =
            own.iter().map(|own| Work { times: [0.0, 0.0, 0.0, *own], ..Work::default() }).collect();
        let of = OfOthers::from_row(&row, Work::own);
        row.iter().map(|work| of.others(work.own())).collect::<Vec<_>>()
    };
    assert_eq!(medians_of_others(&[1.0, 3.0]), [3.0, 1.0]);
    assert_eq!(medians_of_others(&[5.0, 1.0, 2.0]), [1.0, 2.0, 1.0]);
    assert_eq!(medians_of_others(&[4.0, 1.0, 2.0, 3.0]), [2.0, 3.0, 3.0, 2.0]);
    assert_eq!(medians_of_others(&[2.0, 2.0, 1.0, 2.0]), [2.0; 4]);
}

#[test]
fn a_step_that_is_reported_again_counts_as_it_was_reported_first() {
    let mut stragglers = Stragglers::new(Generation(1), 2, Step(0));
    for step in WARM_UP..WARM_UP + 2 * WINDOW as u64 {
        for times in [CALM, scaled(CALM, 3.0)] {
            assert!(stragglers.observe(Rank(0), &report(step, times, 8, 4096)).is_empty());
        }
        assert!(stragglers.observe(Rank(1), &report(step, CALM, 8, 4096)).is_empty(), "step {step}");
    }
}
