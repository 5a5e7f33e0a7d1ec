//! Scripts drawn from a seed: a small run, a rough network, a handful of faults.

use crate::{
    random::Random,
    script::{CachePhases, Fault, Kind, Network, Place, Script, factor, for_s},
};

impl Script {
    /// A small run with a rough network and a handful of faults, all drawn from the seed.
    pub fn drawn(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let nodes = 1 + random.below(3) as u32;
        let workers_per_node = 1 + random.below(3) as u32;
        let elastic = nodes > 1 && random.chance(0.4);
        let steps = 20 + random.below(60);
        let step_ms = 20.0 + 100.0 * random.unit();
        let length = 3.0 + steps as f64 * step_ms / 1000.0;
        let count = random.below(6);
        let shape = (nodes, workers_per_node);
        let mut faults: Vec<_> = (0..count).map(|_| Fault::drawn(&mut random, length, shape)).collect();
        // From a stream of their own, so that what was drawn before there were such faults stays what it was.
        let mut more = Random::new(!seed);
        let count = more.below(3);
        faults.extend((0..count).map(|_| Fault::drawn_later(&mut more, length, shape)));
        let mut more = Random::new(seed.rotate_left(32) ^ !seed);
        if more.chance(0.2) {
            faults.extend(Fault::drawn_start(&mut more, length, shape));
        }
        let cache = more.chance(0.4).then(|| {
            let live = 1 + more.below(6);
            CachePhases { live, interval: live + 1 + more.below(12) }
        });
        let mut stops = Random::new(seed.rotate_left(16) ^ !seed);
        if stops.chance(0.25) {
            faults.push(Fault::drawn_stop(&mut stops, length, nodes));
        }
        let asked = cache.map_or(0, |_| more.below(4));
        faults.extend((0..asked).map(|_| Fault::of_run(length * more.unit(), Kind::RebuildCache)));
        Self {
            seed: random.next(),
            min_nodes: elastic.then(|| 1 + random.below(u64::from(nodes)) as u32),
            nodes,
            workers_per_node,
            spares: 0,
            replace_slow: 0,
            steps,
            samples: 5 + random.below(60),
            global_batch: 1 + random.below(16),
            step_ms,
            load_ms: 100.0 + 1500.0 * random.unit(),
            move_ms: 50.0 * random.unit(),
            checkpoint_every: [0, 5, 16][random.below(3) as usize],
            save_ms: 200.0 * random.unit(),
            eval_ms: 100.0,
            max_restarts: 100,
            replica: random.chance(0.8),
            cache,
            network: Network {
                delay_ms: 0.1 + 2.0 * random.unit(),
                jitter_ms: 60.0 * random.unit() * random.unit(),
                lost_answers: 0.1 * random.unit() * random.unit(),
            },
            faults,
            standby: false,
            verbose: false,
        }
    }

    /// A small run on at least two machines. The coordinator's, and perhaps others, stand still or are cut
    /// off while a launcher elsewhere takes the role.
    pub fn drawn_with_rivals(seed: u64) -> Self {
        let mut random = Random::new(seed.rotate_left(56) ^ !seed);
        let script = Self::drawn(seed);
        let nodes = script.nodes.max(2);
        let length = script.least_s();
        let mut faults = script.faults;
        let others =
            [Kind::Kill, Kind::Slow, Kind::Skew, Kind::CutLine, Kind::CutRing, Kind::KillCoordinator];
        faults.retain(|fault| others.contains(&fault.what));
        for number in 0..1 + random.below(3) {
            let what = if random.chance(0.6) { Kind::StopMachine } else { Kind::CutMachine };
            let node = if number == 0 { 0 } else { random.below(u64::from(nodes)) as u32 };
            let for_s = 1.0 + 9.0 * random.unit();
            faults.push(Fault { node, for_s, ..Fault::of_run(length * random.unit(), what) });
        }
        Self { nodes, standby: true, faults, ..script }
    }

    /// A small run with one or two floods of readers.
    pub fn drawn_with_floods(seed: u64) -> Self {
        let mut random = Random::new(seed.rotate_left(24) ^ !seed);
        let mut script = Self::drawn(seed);
        let length = script.least_s();
        for _ in 0..1 + random.below(2) {
            let (for_s, factor) = (2.0 + 10.0 * random.unit(), 10.0 + random.below(250) as f64);
            let flood = Fault::of_run(length * random.unit(), Kind::Flood);
            script.faults.push(Fault { for_s, factor, ..flood });
        }
        script
    }

    /// A small run with up to three launchers or workers that come back as another version.
    pub fn drawn_with_versions(seed: u64) -> Self {
        let mut random = Random::new(seed.rotate_left(8) ^ !seed);
        let mut script = Self::drawn(seed);
        let length = script.least_s();
        for _ in 0..1 + random.below(3) {
            let what = if random.chance(0.7) { Kind::UpgradeLauncher } else { Kind::UpgradeWorker };
            let node = random.below(u64::from(script.nodes)) as u32;
            let rank = random.below(u64::from(script.slots())) as u32;
            let for_s = 3.0 * random.unit();
            let upgrade = Fault::of_run(length * random.unit(), what);
            script.faults.push(Fault { node, rank, for_s, ..upgrade });
        }
        script
    }

    /// Seconds that it takes undisturbed.
    fn least_s(&self) -> f64 {
        3.0 + self.steps as f64 * self.step_ms / 1e3
    }

    /// A small run with another worker on each node, and some of all as spares.
    pub fn drawn_with_spares(seed: u64) -> Self {
        let mut random = Random::new(seed.rotate_left(48) ^ !seed);
        let script = Self::drawn(seed);
        Self {
            workers_per_node: script.workers_per_node + 1,
            spares: 1 + random.below(u64::from(script.nodes)) as u32,
            replace_slow: random.below(2),
            ..script
        }
    }

    /// A small run with up to four faults of the disk, which does what it says or, if it `lies`, does not.
    pub fn drawn_with_storage(seed: u64, lies: bool) -> Self {
        const HONEST: [Kind; 8] = [
            Kind::PowerLoss,
            Kind::PowerLoss,
            Kind::KillWriting,
            Kind::KillWriting,
            Kind::FullDisk,
            Kind::ReadOnlyDisk,
            Kind::SlowDisk,
            Kind::FailedSync,
        ];
        const LYING: [Kind; 6] = [
            Kind::PowerLoss,
            Kind::PowerLoss,
            Kind::LyingSync,
            Kind::LostWrite,
            Kind::MisdirectedWrite,
            Kind::DamagedCheckpoint,
        ];
        let kinds: &[Kind] = if lies { &LYING } else { &HONEST };
        let mut random = Random::new(seed.rotate_left(40) ^ !seed);
        let mut script = Self::drawn(seed);
        script.faults.retain(|fault| fault.what != Kind::Hang);
        let length = script.least_s();
        for number in 0..1 + random.below(4) {
            // The first one decides that there is a disk at all.
            let what = match number {
                0 if !lies => Kind::SlowDisk,
                _ => kinds[random.below(kinds.len() as u64) as usize],
            };
            script.faults.push(Fault {
                for_s: 6.0 * random.unit() * random.unit(),
                factor: 1.0 + random.below(60) as f64,
                ..Fault::of_run(length * random.unit(), what)
            });
        }
        script
    }
}

impl Fault {
    fn drawn(random: &mut Random, length: f64, (nodes, workers): (u32, u32)) -> Self {
        const ALL: [Kind; 10] = [
            Kind::Kill,
            Kind::Kill,
            Kind::Freeze,
            Kind::Slow,
            Kind::Skew,
            Kind::Partition,
            Kind::CutLine,
            Kind::CutRing,
            Kind::KillCoordinator,
            Kind::KillLauncher,
        ];
        let what = ALL[random.below(ALL.len() as u64) as usize];
        Self {
            at_s: length * random.unit(),
            what,
            rank: random.below(u64::from(nodes * workers)) as u32,
            node: random.below(u64::from(nodes)) as u32,
            for_s: 6.0 * random.unit() * random.unit(),
            factor: 1.0 + 2.0 * random.unit() * random.unit(),
            phase: None,
        }
    }

    /// A hang, somewhere or at once, or a node that is drained.
    fn drawn_later(random: &mut Random, length: f64, (nodes, workers): (u32, u32)) -> Self {
        let what = if random.chance(0.7) { Kind::Hang } else { Kind::Drain };
        let place = random.below(Place::KNOWN.len() as u64 + 1) as usize;
        Self {
            at_s: length * random.unit(),
            what,
            rank: random.below(u64::from(nodes * workers)) as u32,
            node: random.below(u64::from(nodes)) as u32,
            for_s: 6.0 * random.unit() * random.unit(),
            factor: factor(),
            phase: Place::KNOWN.get(place).copied(),
        }
    }

    /// A process that stands still at its start: the first one of its rank, or the one that comes after a
    /// kill.
    fn drawn_start(random: &mut Random, length: f64, (nodes, workers): (u32, u32)) -> [Self; 2] {
        let rank = random.below(u64::from(nodes * workers)) as u32;
        let at_s = if random.chance(0.5) { 0.0 } else { length * random.unit() };
        let kill = Self { rank, ..Self::of_run(at_s, Kind::Kill) };
        [Self { what: Kind::Hang, phase: Some(Place::Start), ..kill.clone() }, kill]
    }

    /// A launcher that is stopped for some seconds.
    fn drawn_stop(random: &mut Random, length: f64, nodes: u32) -> Self {
        let node = random.below(u64::from(nodes)) as u32;
        let for_s = 10.0 * random.unit();
        Self { node, for_s, ..Self::of_run(length * random.unit(), Kind::FreezeLauncher) }
    }

    /// Something that happens to the run, to nobody in particular.
    fn of_run(at_s: f64, what: Kind) -> Self {
        Self { at_s, what, rank: 0, node: 0, for_s: for_s(), factor: factor(), phase: None }
    }
}
