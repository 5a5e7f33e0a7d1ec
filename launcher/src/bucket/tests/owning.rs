//! Who has a run, and what is there after any of its writes.

use super::*;
use crate::bucket::error::BucketError;

/// A launch that keeps three checkpoints, two of them at a time, and leaves its results; steps that were
/// kept.
fn launch(fake: &Fake) -> (Vec<u64>, Result<(), BucketError>) {
    let mut kept = Vec::new();
    let mut go = || {
        let mut owner = Owner::claim(Box::new(fake.clone()), AT, &spec(7), "here")?;
        for step in [10, 20, 30] {
            owner.keep(step, &set(step), 2)?;
            kept.push(step);
        }
        owner.leave(&[source("adapter/adapter_model.safetensors", "learned"), source("summary.json", "{}")])
    };
    let ended = go();
    (kept, ended)
}

#[test]
fn after_any_write_the_bucket_has_the_older_set_or_the_newer_one_whole() {
    let mut seen = Vec::new();
    for writes in 0.. {
        let fake = Fake::failing_after(writes);
        let (kept, ended) = launch(&fake);
        fake.assert_whole();
        let newest = fake.index().and_then(|index| index.newest().map(|set| set.step));
        assert_eq!(newest, kept.last().copied(), "after {writes} writes");
        seen.push(newest);
        if ended.is_ok() && fake.state().writes != Some(0) {
            break;
        }
    }
    seen.dedup();
    assert_eq!(seen, [None, Some(10), Some(20), Some(30)]);
}

#[test]
fn as_many_sets_stay_as_checkpoints_are_kept_and_nothing_else() {
    let fake = Fake::default();
    let (kept, ended) = launch(&fake);
    ended.unwrap();
    assert_eq!(kept, [10, 20, 30]);
    let index = fake.index().unwrap();
    assert_eq!(index.sets.iter().map(|set| set.step).collect::<Vec<_>>(), [20, 30]);
    assert_eq!(fake.names().len(), 1 + 2 * 4 + 2, "index, two sets, results: {:?}", fake.names());
    assert!(fake.names().iter().any(|name| name == "adapter/adapter_model.safetensors"));
}

#[test]
fn what_a_launch_that_was_cut_off_has_begun_is_removed_by_the_next_one() {
    // The run and its probe, a set of four and its index; then two of four files.
    let fake = Fake::failing_after(2 + 5 + 2);
    launch(&fake).1.unwrap_err();
    assert_eq!(fake.names().len(), 1 + 4 + 2);
    fake.state().writes = None;
    let owner = take(&fake, "there");
    assert_eq!(owner.index().newest().unwrap().step, 10);
    assert_eq!(fake.names().len(), 1 + 4, "{:?}", fake.names());
}

#[test]
fn a_checkpoint_that_is_there_goes_up_once_though_its_journal_goes_on() {
    let fake = Fake::default();
    let mut owner = take(&fake, "here");
    owner.keep(10, &set(10), 1).unwrap();
    let before = fake.names();
    let mut ended = set(10);
    ended[3] = source("coordinator/journal.redb", "steps before 10, and the end");
    owner.keep(10, &ended, 1).unwrap();
    let after = fake.names();
    assert_eq!(after.len(), before.len(), "{after:?}");
    let new: Vec<_> = after.iter().filter(|name| !before.contains(name)).collect();
    assert!(matches!(new[..], [journal] if journal.ends_with("journal.redb")), "{new:?}");
    fake.assert_whole();
}

#[test]
fn of_two_launches_that_believe_to_have_the_run_the_earlier_one_is_refused_by_name() {
    let fake = Fake::default();
    let mut first = take(&fake, "node0-77-1");
    first.keep(10, &set(10), 1).unwrap();
    let mut second = take(&fake, "node1-78-2");
    let refused = first.keep(20, &set(20), 1).unwrap_err();
    assert!(matches!(refused, BucketError::Superseded { .. }), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("node1-78-2") && text.contains(AT), "{text}");
    second.keep(20, &set(20), 1).unwrap();
    assert!(first.leave(&[]).is_err());
    fake.assert_whole();
    assert_eq!(fake.index().unwrap().newest().unwrap().step, 20);
}

#[test]
fn a_launch_removes_nothing_of_one_that_has_taken_the_run_since() {
    let fake = Fake::default();
    let first = take(&fake, "first");
    let second = take(&fake, "second");
    let begun = "sets/000002-000001/coordinator/journal.redb";
    fake.state().put(begun, b"under way".to_vec());
    fake.state().put("sets/000001-000001/coordinator/journal.redb", b"given up".to_vec());
    first.sweep();
    assert_eq!(fake.list("sets").unwrap(), [begun]);
    assert_eq!(second.index().launch, 2);
}

#[test]
fn a_write_whose_answer_was_lost_counts() {
    let fake = Fake::default();
    fake.state().loses_answers = true;
    launch(&fake).1.unwrap();
    fake.assert_whole();
    assert_eq!(fake.index().unwrap().launch, 1);
}

#[test]
fn a_set_whose_index_was_written_without_an_answer_is_kept_by_the_next_try_and_goes_up_once() {
    let fake = Fake::default();
    let mut owner = take(&fake, "here");
    owner.keep(5, &set(5), 1).unwrap();
    fake.state().is_cut_off = true;
    owner.keep(10, &set(10), 1).unwrap_err();
    fake.state().is_cut_off = false;
    let before = fake.index().unwrap();
    owner.keep(10, &set(10), 1).unwrap();
    fake.assert_whole();
    assert_eq!(fake.index().unwrap(), before);
    assert_eq!(fake.names().len(), 1 + 4, "{:?}", fake.names());
    // The last one, at the run's end.
    fake.state().is_cut_off = true;
    owner.keep(20, &set(20), 1).unwrap_err();
    fake.state().is_cut_off = false;
    owner.leave(&[source("summary.json", "{}")]).unwrap();
    fake.assert_whole();
    assert_eq!(fake.index().unwrap().newest().unwrap().step, 20);
}

#[test]
fn a_server_that_knows_no_conditions_is_refused() {
    let fake = Fake::default();
    fake.state().heedless = true;
    let refused = Owner::claim(Box::new(fake), AT, &spec(7), "here").err().unwrap().to_string();
    assert!(refused.contains(AT) && refused.contains("If-None-Match"), "{refused}");
}

#[test]
fn another_run_is_refused_with_what_differs_and_so_is_what_is_no_index() {
    let fake = Fake::default();
    take(&fake, "here").keep(10, &set(10), 1).unwrap();
    let refused = Owner::claim(Box::new(fake.clone()), AT, &spec(8), "there").err().unwrap().to_string();
    assert!(
        refused.contains("holds another run, quick, after step 10") && refused.contains("run.seed"),
        "{refused}"
    );
    for (bytes, expected) in [(&b"{}"[..], "missing field"), (b"\xff", "expected value")] {
        fake.state().put(INDEX, bytes.to_vec());
        let refused = Owner::claim(Box::new(fake.clone()), AT, &spec(7), "there").err().unwrap().to_string();
        assert!(refused.contains(expected) && refused.contains("an address of its own"), "{refused}");
    }
}
