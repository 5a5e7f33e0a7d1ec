//! What one life of the coordinator remembers is what the next one finds.

mod hostile;

use std::{path::Path, sync::Arc};

use coxswain_proto::{
    cache_plan::{CacheDecision, CacheGeneration, Cause},
    ids::{Generation, Slot, WorkerId},
    limits::{MAX_CACHE_PHASES, MAX_GENERATIONS_KEPT},
    order::DamagedRow,
};

use super::*;
use crate::{
    core::{
        cache::{GENERATIONS_KEPT, GenerationEntry},
        failure::Failure,
        phase::End,
        quarantine::{BadSample, Quarantine, Try},
        report::StateSource,
        slot_health::SlotHealth,
        tests::claim,
    },
    options::CauseKind,
};

fn spec() -> RunSpec {
    serde_json::from_value(serde_json::json!({
        "run": {"name": "quick", "output_dir": "out", "seed": 7},
        "model": {"path": "models/tiny"},
        "data": {"path": "data/tiny", "cameras": ["front"]},
        "train": {"steps": 100, "global_batch": 8, "micro_batch": 2},
    }))
    .expect("the specification is complete")
}

fn open(directory: &Path, life: Life) -> (Durable, Past) {
    let (journal, _, memory) = Durable::open(directory, &spec(), None, "quick-1", life).expect("it is ours");
    (journal, memory.past)
}

fn members(generation: u64) -> Vec<(Slot, WorkerId)> {
    (0..2).map(|rank| (Slot(rank), WorkerId(10 * generation + u64::from(rank)))).collect()
}

/// A run with something of everything that is recorded.
fn records() -> Vec<Record> {
    let mut quarantine = Quarantine::default();
    let row = DamagedRow { row: 4, begin: 3, end: 5 };
    let sample = BadSample { epoch: 0, position: 9, row };
    quarantine.failed(Try { sample, slot: Slot(0), generation: Generation(1) }, 1);
    let failure = Arc::new(Failure::of_run(CauseKind::WorkerLost, "killed".into()));
    let decided = CacheDecision {
        first: Step(20),
        generation: CacheGeneration { number: 1, since: Step(20) },
        why: Cause::First,
    };
    let noted = Some((WorkerId(11), 4));
    let health = SlotHealth { faults: 2, newest: "wrong".into(), cordoned: true, noted };
    vec![
        Record::DataSet(claim(0).dataset),
        Record::Node { place: 0, node_id: "n".into(), host: "node-a".into(), version: "1.2.3".into() },
        Record::Worker(WorkerId(10), Box::new(claim(0))),
        Record::Generation { generation: Generation(1), members: members(1) },
        Record::Started { generation: Generation(1), first_step: Step(0), source: StateSource::Fresh },
        Record::Quarantine(quarantine),
        Record::Health([(Slot(1), health)].into()),
        Record::Failure(failure),
        Record::CachePhase(decided),
        Record::Broken { generation: Generation(1) },
        Record::Generation { generation: Generation(2), members: members(2) },
        Record::Started { generation: Generation(2), first_step: Step(60), source: StateSource::Replica },
    ]
}

#[test]
fn a_life_finds_what_the_one_before_it_remembered() {
    let over = [Record::Over(End::Finished(Step(60)))];
    for (life, end) in [(Life::Anew, &[][..]), (Life::Again, &[]), (Life::Again, &over), (Life::Anew, &over)]
    {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut journal, _) = open(directory.path(), Life::Again);
        journal.append(&records()).expect("a disk");
        journal.append(end).expect("a disk");
        drop(journal);
        let (journal, remembered) = open(directory.path(), life);
        drop(journal);
        let (_, found) = open(directory.path(), Life::Restarted);
        assert_eq!(found, remembered, "{life:?} after {end:?}");
        if life == Life::Anew {
            let numbers = remembered.generations.into_keys().collect::<Vec<_>>();
            assert_eq!((numbers, found.committed), (vec![Generation(1), Generation(2)], None));
            assert_eq!(found.quarantine, Quarantine::default());
        }
    }
}

#[test]
fn room_is_waited_for_until_the_coordinator_is_stopped() {
    use std::io::ErrorKind::{ReadOnlyFilesystem, StorageFull};
    for why in [StorageFull, ReadOnlyFilesystem] {
        let directory = tempfile::tempdir().expect("a directory");
        let stop = CancellationToken::new();
        let mut journal = open(directory.path(), Life::Again).0.until(stop.clone());
        stop.cancel();
        let refused = journal.write(|_: &WriteTransaction| Err(redb::Error::Io(why.into())));
        assert!(matches!(refused, Err(JournalError::Stopped { .. })), "{why}");
        drop(journal);
        open(directory.path(), Life::Restarted);
    }
}

#[test]
fn the_tables_add_up_as_the_records_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut journal, mut past) = open(directory.path(), Life::Again);
    for record in records() {
        journal.append(std::slice::from_ref(&record)).expect("a disk");
        past.add_record(&record);
    }
    drop(journal);
    let (_, found) = open(directory.path(), Life::Restarted);
    assert_eq!(found, past);
    assert_eq!(found.generations[&Generation(1)].members, []);
    assert_eq!(
        (found.generations[&Generation(1)].workers, found.generations[&Generation(2)].members.len()),
        (2, 2)
    );
}

#[test]
fn of_the_feature_cache_no_more_is_kept_than_the_machine_keeps() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut journal, mut past) = open(directory.path(), Life::Again);
    let begun = |number: u64| CacheDecision {
        first: Step(number),
        generation: CacheGeneration { number, since: Step(number) },
        why: Cause::First,
    };
    for number in 1..=GENERATIONS_KEPT as u64 + 5 {
        let entry = GenerationEntry::new(number, Step(number), None);
        let record = Record::CacheGeneration(Box::new(entry));
        past.add_record(&record);
        journal.append(&[record]).expect("a disk");
    }
    for step in 0..=MAX_CACHE_PHASES as u64 {
        past.add_record(&Record::CachePhase(begun(step)));
    }
    assert_eq!((past.caches.len(), past.cache_phases.len()), (GENERATIONS_KEPT, MAX_CACHE_PHASES));
    drop(journal);
    assert_eq!(open(directory.path(), Life::Restarted).1.caches, past.caches);
}

#[test]
fn memberships_of_long_ago_are_forgotten() {
    let mut past = Past::default();
    let rows = MAX_GENERATIONS_KEPT as u64 + 5;
    for generation in (1..=rows).map(Generation) {
        past.add_record(&Record::Generation { generation, members: members(1) });
        if generation.0 % 2 == 1 {
            past.add_record(&Record::Started { generation, first_step: Step(0), source: StateSource::Fresh });
        }
    }
    assert_eq!(past.generations.len(), MAX_GENERATIONS_KEPT);
    let with_members = past.generations.values().filter(|past| !past.members.is_empty()).count();
    assert!(with_members <= 2, "{with_members}");
}
