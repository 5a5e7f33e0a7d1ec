//! From events to what is done about them: decided by the core, recorded, and only then told. While the disk
//! takes its time the coordinator is deaf. The next coordinator begins with what is on the disk.

use coxswain_coordinator::{
    core::{
        action::{Action, Record},
        event::Event,
        invariants,
        machine::Machine,
        past::Past,
    },
    journal::{JournalError, Life},
};

use super::on_disk;
use crate::{
    versions::name,
    world::{Happening, World},
};

/// Events after which a large world is looked at: looking is linear in it.
const LOOK_EVERY: u64 = 500;
/// Worlds up to this size are looked at after every event.
const SMALL: u32 = 32;

/// What the coordinator has decided, and does as soon as it is recorded.
pub struct Recording {
    pub records: Vec<Record>,
    pub actions: Vec<Action>,
}

impl World {
    /// Another coordinator reads what the one before has recorded.
    pub fn recall(&mut self) {
        if self.coordinator.machine.is_some() || self.is_superseded() {
            return;
        }
        self.coordinator.deaf_since = None;
        let sleeps = self.coordinator.frozen_until.saturating_sub(self.now);
        if !sleeps.is_zero() {
            return self.after(sleeps, Happening::Recall);
        }
        let restarted = !std::mem::take(&mut self.coordinator.new_launch);
        let mut config = self.coordinator.config.clone();
        (config.life, config.past) = (self.coordinator.life, self.coordinator.past.clone());
        let life = if restarted { Life::Restarted } else { Life::Again };
        match self.coordinator.storage.as_mut().map(|storage| storage.open(self.now, life)) {
            None => {}
            Some(Ok((lives, past))) => {
                self.recalls(life, &past);
                self.coordinator.past = past.clone();
                // A clock of its own.
                self.coordinator.stood_still = self.now;
                (config.life, config.past) = (lives + 1, past);
            }
            Some(Err(error)) => return self.not_started(&error, restarted),
        }
        self.coordinator.config.version = name(self.nodes[self.coordinator.host].version);
        config.version = self.coordinator.config.version.clone();
        config.restarted = restarted;
        if !restarted {
            self.checker.launched_again();
        }
        config.checkpoints = self.disk.iter().copied().map(on_disk).collect();
        let machine = Machine::new(self.coordinator.time(self.now), config);
        self.checker.recalled(&machine);
        self.coordinator.machine = Some(machine);
        self.look();
        self.set_tick();
    }

    /// What was told is remembered; what was decided and not told may be, all or none of it.
    fn recalls(&mut self, life: Life, past: &Past) {
        let untold = self.coordinator.recording.take().map(|untold| untold.records).unwrap_or_default();
        let told = self.coordinator.past.clone();
        let mut all = told.clone();
        untold.iter().for_each(|record| all.add_record(record));
        let begins =
            |past: Past| if life == Life::Again && past.end.is_some() { past.settled() } else { past };
        if begins(told) == *past {
            return;
        }
        if begins(all) == *past {
            return untold.iter().for_each(|record| self.learn(record));
        }
        match self.coordinator.storage.as_ref().is_some_and(|storage| storage.lied) {
            true => self.checker.forgets(self.now, past, self.disk.last().copied()),
            false => self.checker.violated(self.now, "the journal is not what was told".into()),
        }
    }

    pub(super) fn deliver(&mut self, event: Event) {
        match self.coordinator.recording.is_some() || self.coordinator.frozen_until > self.now {
            true => self.coordinator.inbox.push(event),
            false => self.handle(vec![event]),
        }
    }

    fn handle(&mut self, events: Vec<Event>) {
        self.coordinator.hears_again(self.now);
        let now = self.coordinator.time(self.now);
        let Some(machine) = &mut self.coordinator.machine else { return };
        let actions: Vec<_> = events.into_iter().flat_map(|event| machine.handle(now, event)).collect();
        let records: Vec<_> = actions
            .iter()
            .filter_map(
                |action| if let Action::Record(record) = action { Some(record.clone()) } else { None },
            )
            .collect();
        let recording = Recording { records, actions };
        match self.coordinator.storage.as_mut().filter(|_| !recording.records.is_empty()) {
            None => self.recorded(recording),
            Some(storage) => {
                let appended = storage.append(self.now, &recording.records);
                self.coordinator.recording = Some(recording);
                match appended {
                    Ok(took) => {
                        // The directory's server does not answer a machine that is cut off.
                        let took = took.max(self.cuts[self.coordinator.host].saturating_sub(self.now));
                        self.coordinator.deaf_since.get_or_insert(self.now);
                        self.coordinator.due = self.now + took;
                        self.after(took, Happening::Recorded(self.coordinator.life));
                    }
                    Err(error) => self.coordinator_fails(&error),
                }
            }
        }
    }

    /// The disk has what the coordinator waited for.
    pub fn written(&mut self, life: u32) {
        let due = self.coordinator.due;
        if life != self.coordinator.life || self.coordinator.frozen_until > self.now || due > self.now {
            return;
        }
        // The fence asks once more when the disk has answered.
        if self.coordinator.recording.is_some() && self.is_superseded() {
            return self.coordinator_fails(&JournalError::Superseded { number: self.coordinator.claim });
        }
        self.coordinator.hears_again(self.now);
        if let Some(recording) = self.coordinator.recording.take() {
            self.recorded(recording);
        }
        let events = std::mem::take(&mut self.coordinator.inbox);
        if !events.is_empty() {
            self.handle(events);
        }
    }

    fn recorded(&mut self, Recording { records, actions }: Recording) {
        for record in &records {
            self.coordinator.past.add_record(record);
            self.learn(record);
        }
        for action in actions {
            self.carry_out(action);
        }
        self.coordinator.events += 1;
        if self.script.slots() <= SMALL || self.coordinator.events.is_multiple_of(LOOK_EVERY) {
            self.look();
        }
        self.set_tick();
    }

    /// A record counts.
    fn learn(&mut self, record: &Record) {
        if let Record::Worker(id, claim) = record {
            self.coordinator.workers.insert(*id, claim.pid as usize);
        }
        self.checker.record(self.now, record);
        self.look_at_versions(record);
    }

    pub(super) fn look(&mut self) {
        if let Some(machine) = &self.coordinator.machine {
            if let Some(name) = invariants::violated(machine) {
                self.checker.violated(self.now, format!("core: {name}"));
            }
            if !self.is_superseded() {
                self.checker.agrees_with(self.now, machine);
            }
        }
    }

    fn set_tick(&mut self) {
        let Some(due) = self.coordinator.machine.as_ref().and_then(Machine::next_deadline) else { return };
        let due = (due.elapsed() + self.coordinator.stood_still).max(self.now);
        if self.coordinator.ticks.is_none_or(|set| due < set) {
            self.coordinator.ticks = Some(due);
            self.after(due - self.now, Happening::Tick(self.coordinator.life));
        }
    }
}
