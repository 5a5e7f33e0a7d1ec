//! Faults of hardware, slot by slot, and the slots that are not used any more for that.
//!
//! ```text
//! counts       a health check that was not passed, results that were wrong, what a driver reports of a GPU
//! does not     a process that was killed, hung or was cut off: that is anybody's
//! cordoned     after so many (`faults.cordon_after`): no process is started there, and none is let in, until
//!              another launcher has the slot's node
//! ```
//!
//! A slot always has the same device of its machine, so it stands for that. What a cordoned slot means for
//! the run is not this file's affair.

use std::collections::BTreeMap;

use coxswain_proto::{
    human,
    ids::{Slot, WorkerId},
    limits::MAX_HARDWARE_TEXT,
};

use super::{
    action::{Action, Record},
    news::News,
    slot_health::SlotHealth,
};

/// All slots whose hardware has shown a fault.
#[derive(Clone, Debug)]
pub struct Health {
    /// Faults after which a slot is not used any more; 0: it always is.
    after: u32,
    slots: BTreeMap<Slot, SlotHealth>,
}

impl Health {
    /// As an earlier life of the coordinator has left it.
    pub fn new(after: u32, slots: BTreeMap<Slot, SlotHealth>) -> Self {
        Self { after, slots }
    }

    /// Whether a slot is not used any more.
    pub fn is_cordoned(&self, slot: Slot) -> bool {
        self.slots.get(&slot).is_some_and(|health| health.cordoned)
    }

    /// What is known of a slot, if it has shown a fault.
    pub fn of_slot(&self, slot: Slot) -> Option<&SlotHealth> {
        self.slots.get(&slot)
    }

    /// Slots that have shown faults, in order.
    pub fn faulty(&self) -> impl Iterator<Item = (Slot, &SlotHealth)> {
        self.slots.iter().map(|(slot, health)| (*slot, health))
    }

    /// One more fault of a slot, perhaps from a worker's note with this number; true if it is cordoned by it.
    pub fn count(
        &mut self,
        slot: Slot,
        what: &str,
        noted: Option<(WorkerId, u64)>,
        out: &mut Vec<Action>,
    ) -> bool {
        let health = self.slots.entry(slot).or_default();
        health.faults = health.faults.saturating_add(1);
        health.noted = noted.or(health.noted);
        health.newest = human::start(what, MAX_HARDWARE_TEXT);
        let cordoned = !health.cordoned && self.after > 0 && health.faults >= self.after;
        health.cordoned |= cordoned;
        if cordoned {
            out.push(Action::Publish(News::Cordoned(slot, health.clone())));
        }
        self.record(out);
        cordoned
    }

    /// Another launcher has these slots, and with it another machine perhaps, or one that was repaired.
    pub fn forget(&mut self, slots: impl Iterator<Item = Slot>, out: &mut Vec<Action>) {
        let known = self.slots.len();
        slots.for_each(|slot| drop(self.slots.remove(&slot)));
        if self.slots.len() < known {
            self.record(out);
        }
    }

    fn record(&self, out: &mut Vec<Action>) {
        out.push(Action::Record(Record::Health(self.slots.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Slot = Slot(1);

    fn count(health: &mut Health, slot: Slot) -> (bool, usize) {
        let mut out = Vec::new();
        let cordoned = health.count(slot, "wrong", None, &mut out);
        (cordoned, out.iter().filter(|action| matches!(action, Action::Publish(_))).count())
    }

    #[test]
    fn a_slot_is_cordoned_once_after_so_many_faults_of_its_own() {
        let mut health = Health::new(2, BTreeMap::new());
        assert_eq!([count(&mut health, ONE), count(&mut health, Slot(0))], [(false, 0); 2]);
        assert!(!health.is_cordoned(ONE));
        assert_eq!(count(&mut health, ONE), (true, 1));
        assert_eq!(count(&mut health, ONE), (false, 0), "it is known");
        assert!(health.is_cordoned(ONE) && !health.is_cordoned(Slot(0)));
        assert_eq!(health.of_slot(ONE).map(|health| health.faults), Some(3));
    }

    #[test]
    fn none_is_cordoned_where_that_is_not_wanted() {
        let mut health = Health::new(0, BTreeMap::new());
        assert!((0..9).all(|_| count(&mut health, ONE) == (false, 0)) && !health.is_cordoned(ONE));
    }

    #[test]
    fn another_launcher_begins_anew() {
        let mut health = Health::new(1, BTreeMap::new());
        count(&mut health, ONE);
        let mut out = Vec::new();
        health.forget([Slot(0)].into_iter(), &mut out);
        assert!(health.is_cordoned(ONE) && out.is_empty());
        health.forget([Slot(0), ONE].into_iter(), &mut out);
        assert!(!health.is_cordoned(ONE));
        assert_eq!(out, [Action::Record(Record::Health(BTreeMap::new()))]);
    }

    #[test]
    fn what_is_known_outlives_the_coordinator() {
        let noted = Some((WorkerId(7), 3));
        let mut known =
            BTreeMap::from([(ONE, SlotHealth { faults: 2, newest: "x".into(), cordoned: true, noted })]);
        let json = serde_json::to_string(&known).expect("it is plain data");
        let read = |json: &str| serde_json::from_str::<BTreeMap<Slot, SlotHealth>>(json).expect("as written");
        assert_eq!(read(&json), known);
        // An earlier version did not know of notes.
        known.get_mut(&ONE).expect("it is there").noted = None;
        assert_eq!(read(r#"{"1":{"faults":2,"newest":"x","cordoned":true}}"#), known);
    }
}
