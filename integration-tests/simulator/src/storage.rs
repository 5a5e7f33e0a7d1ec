//! The real journal on a disk that fails, and what the coordinator does about it: it is busy for as long as
//! the disk is, ends by an error, and is started again by its launcher until that gives up.

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use coxswain_coordinator::{
    core::{action::Record, past::Past},
    journal::{Durable, Fence, Journal, JournalError, Life, Location},
};
use coxswain_proto::{
    limits::{COORDINATOR_RESTARTS, COORDINATOR_WINDOW},
    run_spec::RunSpec,
};

use crate::{
    coordinator::RUN,
    disk::SimulatedDisk,
    script::{Fault, Kind, Script},
    world::{Happening, World},
};

/// Which node has the disk.
const MACHINE: usize = 0;
/// Before a coordinator is started again that ended by an error of its own; twice as long for each one after
/// it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Before one is started again that was killed.
const KILLED: Duration = Duration::from_millis(20);
/// Before a person launches again what could not be launched, and how often.
const PERSON: Duration = Duration::from_secs(10);
const LAUNCHES: u32 = 4;

/// The journal and its disk.
#[derive(Debug)]
pub struct Storage {
    pub disk: SimulatedDisk,
    spec: RunSpec,
    journal: OpenJournal,
    /// The newest claim to the role, and the one of this coordinator.
    claims: Arc<AtomicU64>,
    claim: u64,
    /// Deaths of the last time, each with its moment.
    deaths: VecDeque<Duration>,
    /// Coordinators in a row that could not read it.
    refusals: u32,
    /// The disk has forgotten what it said it had, or has it elsewhere: what was told may be lost.
    pub lied: bool,
}

/// The journal has no text of its own.
struct OpenJournal(Option<Fence<Durable>>);

impl std::fmt::Debug for OpenJournal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "open" } else { "closed" })
    }
}

impl Storage {
    /// Storage of a run that is to meet faults of it, or more than one coordinator, with an empty journal.
    pub fn of(script: &Script, claims: &Arc<AtomicU64>) -> Option<Self> {
        let is_needed = script.standby || script.faults.iter().any(|fault| fault.what.is_of_storage());
        let seed = script.seed ^ 0x6469_736b;
        is_needed.then(|| Self::on(SimulatedDisk::new(seed, claims), claims.clone(), 1))
    }

    /// What the coordinator of the newest claim takes over.
    pub fn inherited(&self, claim: u64) -> Self {
        let inherited = Self::on(self.disk.inherited(claim), self.claims.clone(), claim);
        Self { lied: self.lied, ..inherited }
    }

    fn on(disk: SimulatedDisk, claims: Arc<AtomicU64>, claim: u64) -> Self {
        Self {
            disk,
            spec: spec(),
            journal: OpenJournal(None),
            claims,
            claim,
            deaths: VecDeque::new(),
            refusals: 0,
            lied: false,
        }
    }

    /// A coordinator reads what the one before has left.
    pub fn open(&mut self, now: Duration, life: Life) -> Result<(u32, Past), JournalError> {
        self.disk.at(now);
        let location = Location::on(Path::new("coordinator"), Arc::new(self.disk.clone()));
        let (journal, _, remembered) = Durable::open(location, &self.spec, Some(RUN), RUN, life)?;
        self.refusals = 0;
        let (claims, claim) = (self.claims.clone(), self.claim);
        self.journal = OpenJournal(Some(Fence::new(journal, claim, move || claims.load(SeqCst) > claim)));
        Ok((remembered.lives, remembered.past))
    }

    /// Makes records durable; how long that took.
    pub fn append(&mut self, now: Duration, records: &[Record]) -> Result<Duration, JournalError> {
        self.disk.at(now);
        let journal = self.journal.0.as_mut().expect("who records has opened the journal");
        journal.append(records)?;
        Ok(self.disk.took())
    }

    /// The coordinator's process is gone.
    pub fn drop_journal(&mut self) {
        self.disk.process_gone();
        self.journal = OpenJournal(None);
    }

    /// How long until the next coordinator, if its launcher does not give up.
    fn dies(&mut self, now: Duration) -> Option<Duration> {
        self.deaths.retain(|at| now - *at < COORDINATOR_WINDOW);
        let pause = FIRST_PAUSE * (1 << self.deaths.len());
        self.deaths.push_back(now);
        (self.deaths.len() <= COORDINATOR_RESTARTS).then_some(pause)
    }
}

fn spec() -> RunSpec {
    serde_json::from_value(serde_json::json!({
        "run": {"name": RUN, "output_dir": "out", "seed": 7},
        "model": {"path": "model"},
        "data": {"path": "data", "cameras": ["front"]},
        "train": {"steps": 100, "global_batch": 8, "micro_batch": 2},
    }))
    .expect("the specification is complete")
}

impl World {
    /// What is wrong with the disk from now on.
    pub fn storage_fault(&mut self, fault: &Fault) {
        let until = self.now + fault.lasts();
        let Some(storage) = &mut self.coordinator.storage else { return };
        storage.lied |= fault.what.is_of_a_lying_disk();
        let disk = storage.disk.clone();
        match fault.what {
            Kind::PowerLoss => {
                disk.lose_power();
                self.flimsy_checkpoints_break();
                self.kill_launcher(MACHINE, fault.lasts());
            }
            Kind::KillWriting => disk.breaks(|of| of.kills_after = Some(fault.factor as u64)),
            Kind::FullDisk => disk.breaks(|of| of.full_until = until),
            Kind::ReadOnlyDisk => disk.breaks(|of| of.read_only_until = until),
            Kind::SlowDisk => disk.breaks(|of| of.slow_until = until),
            Kind::FailedSync => disk.breaks(|of| of.fails_sync = true),
            Kind::LyingSync => disk.breaks(|of| of.lies_until = until),
            Kind::LostWrite => disk.breaks(|of| of.loses = true),
            Kind::MisdirectedWrite => disk.breaks(|of| of.misdirects = true),
            Kind::DamagedCheckpoint => {
                self.damaged.extend(self.disk.last());
            }
            _ => {}
        }
    }

    /// A checkpoint that a lying disk said it had is damaged after a loss of power.
    fn flimsy_checkpoints_break(&mut self) {
        for step in std::mem::take(&mut self.flimsy) {
            if self.random.chance(0.5) {
                self.damaged.insert(step);
            }
        }
    }

    /// The coordinator has ended by an error: it is started again, or given up.
    pub fn coordinator_fails(&mut self, error: &JournalError) {
        if let JournalError::Superseded { number } = error {
            self.checker.says(self.now, format!("coordinator {number} ends: {error}"));
            return self.kill_coordinator(Duration::ZERO);
        }
        let (now, killed) =
            (self.now, self.coordinator.storage.as_ref().is_some_and(|it| it.disk.has_killed()));
        if killed {
            self.checker.says(now, "the coordinator is killed in a write".into());
            return self.kill_coordinator(KILLED);
        }
        self.checker.says(now, format!("the coordinator ends: {error}"));
        self.again_or_never(error);
    }

    fn again_or_never(&mut self, error: &JournalError) {
        let Some(storage) = &mut self.coordinator.storage else { return };
        match storage.dies(self.now) {
            Some(pause) => self.kill_coordinator(pause),
            None => self.refuse(error.to_string()),
        }
    }

    /// A coordinator could not be started.
    pub fn not_started(&mut self, error: &JournalError, restarted: bool) {
        let Some(storage) = &mut self.coordinator.storage else { return };
        storage.drop_journal();
        if storage.disk.has_killed() {
            self.checker.says(self.now, "the coordinator is killed in a write".into());
            self.coordinator.new_launch = !restarted;
            return self.after(KILLED, Happening::Recall);
        }
        self.checker.says(self.now, format!("the coordinator cannot start: {error}"));
        storage.refusals += 1;
        let pause = match restarted {
            true => storage.dies(self.now),
            false => (storage.refusals < LAUNCHES).then_some(PERSON),
        };
        match pause {
            Some(pause) => {
                self.coordinator.new_launch = !restarted;
                self.after(pause, Happening::Recall);
            }
            None => self.refuse(error.to_string()),
        }
    }

    /// The run ends, and says why.
    fn refuse(&mut self, why: String) {
        self.refused = Some(why);
    }
}
