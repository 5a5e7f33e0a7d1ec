//! Processes that are being started, and one that nobody ever hears of.

use super::{
    super::{
        action::Record,
        status::{Occupant, Status},
    },
    mortal::Mortal,
    recovery::survived,
    *,
};

/// A node of three workers whose launcher has just started them.
fn launched() -> Run {
    let mut run = Run::new(patient());
    run.tell(join(3));
    run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    run
}

/// A rendezvous that lasts longer than any start here.
fn patient() -> Config {
    let mut config = config(3);
    config.patience.rendezvous = Duration::from_secs(600);
    config
}

/// A launcher of so many workers takes a place.
fn join(workers: u32) -> Ask {
    Ask::JoinNode(NodeClaim {
        origin: origin(),
        node_id: NODE.into(),
        host: "node-a".into(),
        local_world: workers,
        node_rank: None,
        returns: false,
    })
}

/// A process makes itself known, opens its line and is ready.
fn come(run: &mut Run, rank: u32) {
    assert!(run.ask(Ask::Register(claim(rank))).0.is_ok());
    assert!(run.follow(rank, u64::from(rank)).0.is_ok());
    run.get_ready(rank, 0, "");
}

/// Seconds in which all workers that are there live and wait.
fn live(run: &mut Run, seconds: u64) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..seconds {
        actions.extend(run.wait(Duration::from_secs(1)));
        let there: Vec<_> = run.machine.run.fleet.roster.living().map(|worker| worker.slot().0).collect();
        actions.extend(there.into_iter().flat_map(|rank| run.beat(rank, WorkerPhase::Joining)));
    }
    actions
}

/// The lines about ranks that stand still.
fn named(actions: &[Action]) -> Vec<(u32, String)> {
    let named = news(actions).into_iter().filter_map(|news| match news {
        News::Standstill(slot, text) => Some((slot.0, text.clone())),
        _ => None,
    });
    named.collect()
}

fn status(run: &mut Run) -> Status {
    run.status()
}

#[test]
fn status_has_a_row_for_a_process_that_is_on_its_way() {
    let mut run = launched();
    run.wait(Duration::from_millis(300));
    come(&mut run, 1);
    let before = status(&mut run);
    assert_eq!((before.workers.present, before.ranks.len()), (1, 3));
    for (rank, slot) in before.ranks.iter().zip(0..) {
        assert_eq!((rank.slot, rank.local_rank, rank.host.as_str()), (Slot(slot), slot, "node-a"));
        assert_eq!(rank.occupant == Occupant::Starting, slot != 1, "{rank:?}");
    }
    assert_eq!(before.ranks[2].silent, Duration::from_millis(300), "since it was started");

    come(&mut run, 0);
    come(&mut run, 2);
    run.start_all(3, 0, StateSource::Fresh);
    run.kill(2);
    let after = status(&mut run);
    assert_eq!((after.workers.present, &after.ranks[2].occupant), (2, &Occupant::Starting), "its successor");
    assert!(after.ranks[..2].iter().all(|rank| rank.worker().is_some_and(|worker| !worker.gone)));
}

#[test]
fn a_lost_worker_that_is_not_started_again_is_shown_to_be_gone() {
    let mut run = Run::new(patient());
    (0..3).for_each(|rank| come(&mut run, rank));
    run.start_all(3, 0, StateSource::Fresh);
    let (worker, stream) = (run.worker(2), StreamId(2));
    run.event(Event::LineClosed(worker, stream));
    for _ in 0..2 {
        run.wait(Duration::from_secs(1));
        (0..2).for_each(|rank| drop(run.beat(rank, WorkerPhase::Communication)));
    }
    let shown = status(&mut run);
    let gone = |slot: usize| shown.ranks[slot].worker().map(|worker| worker.gone);
    assert_eq!((shown.workers.present, gone(0), gone(2)), (2, Some(false), Some(true)));
}

#[test]
fn a_process_that_is_never_heard_of_is_named_within_ten_seconds_of_what_others_took_and_replaced() {
    let mut run = launched();
    run.wait(Duration::from_millis(300));
    (0..2).for_each(|rank| come(&mut run, rank));
    assert_eq!(named(&live(&mut run, 9)), [], "three times the least, and seven seconds, are not over");
    let actions = live(&mut run, 2);
    let expected = "has not registered yet, 1";
    let [(2, text)] = &named(&actions)[..] else { panic!("{actions:?}") };
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("(usually 1.0 s); it is declared lost unless"), "{text}");
    assert_eq!(survived(&actions), None, "it may be waiting for a disk");
    let actions = live(&mut run, 20);
    let text = survived(&actions).expect("it is given up");
    assert!(text.starts_with("rank 2 on node-a, start: it has not registered"), "{text}");
    assert_eq!(respawns(&actions), [(2, 1)]);
    assert_eq!(run.machine.run.faults.spent.restarts, 1);
    come(&mut run, 2);
    assert_eq!(run.phase(), RunPhase::Starting, "the generation is complete");
}

#[test]
fn the_first_process_of_a_run_is_named_once_a_disk_would_have_answered_and_has_five_minutes() {
    let mut run = Run::new(Config { world: World::fixed(1, 1), ..patient() });
    run.tell(join(1));
    run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
    assert_eq!(named(&live(&mut run, 27)), []);
    let actions = live(&mut run, 2);
    let [(0, text)] = &named(&actions)[..] else { panic!("{actions:?}") };
    assert!(text.contains("its usual time is unknown"), "{text}");
    assert_eq!(respawns(&live(&mut run, 270)), []);
    assert_eq!(respawns(&live(&mut run, 3)), [(0, 1)]);
}

#[test]
fn a_named_process_that_comes_after_all_is_reported_to_have_come() {
    let mut run = launched();
    (0..2).for_each(|rank| come(&mut run, rank));
    assert_eq!(named(&live(&mut run, 12)).len(), 1);
    let (_, actions) = run.ask(Ask::Register(claim(2)));
    assert_eq!(named(&actions), [(2, "has registered".to_owned())]);
    assert_eq!(run.machine.run.faults.spent.restarts, 0);
}

#[test]
fn processes_of_a_launcher_that_was_called_gone_before_its_first_line_are_waited_for_no_longer_than_others() {
    for joins_again in [false, true] {
        let mut run = Run::new(patient());
        run.tell(join(3));
        let actions = run.wait(Duration::from_secs(11));
        let is_gone = |action: &Action| matches!(action, Action::Record(Record::NodeGone { place: 0 }));
        assert!(actions.iter().any(is_gone), "{actions:?}");
        if joins_again {
            run.tell(join(3));
        }
        run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
        run.wait(Duration::from_millis(300));
        (0..2).for_each(|rank| come(&mut run, rank));
        let named: Vec<_> = named(&live(&mut run, 12)).into_iter().map(|(rank, _)| rank).collect();
        assert_eq!(named, [2], "joins again: {joins_again}");
    }
}

#[test]
fn a_machine_that_starts_everything_slowly_does_not_use_up_the_restarts() {
    let mut run = launched();
    (0..2).for_each(|rank| come(&mut run, rank));
    let first = live(&mut run, 32);
    assert_eq!(respawns(&first), [(2, 1)]);
    // Its successor has three times as long as the first one was given.
    assert_eq!(respawns(&live(&mut run, 110)), []);
    assert_eq!(respawns(&live(&mut run, 12)), [(2, 2)]);
}

#[test]
fn what_most_processes_are_waiting_for_is_nobodys_fault() {
    let mut run = launched();
    come(&mut run, 0);
    let actions = live(&mut run, 59);
    assert!(
        matches!(&named(&actions)[..], [(1, text)] if text.contains("1 other rank hangs in the same way")),
        "{actions:?}"
    );
    assert_eq!((survived(&actions), run.machine.run.faults.spent.restarts), (None, 0));
}

#[test]
fn a_successor_that_is_never_heard_of_is_replaced_too_and_nobody_waits_for_whom_no_launcher_starts() {
    let mut run = launched();
    (0..3).for_each(|rank| come(&mut run, rank));
    run.start_all(3, 0, StateSource::Fresh);
    assert_eq!(respawns(&run.kill(2)), [(2, 1)]);
    for rank in 0..2 {
        run.get_ready(rank, 1, "");
    }
    let actions = live(&mut run, 32);
    assert_eq!(respawns(&actions), [(2, 2)]);
    assert!(survived(&actions).is_some_and(|text| text.contains("its process was started on node-a")));
    // The end of a process that nobody knows is told by its number, and another one is asked for at once.
    let (slot, pid, ended) = (Slot(2), Some(999), super::super::event::ProcessExit::Signal(9));
    let actions = run.tell(Ask::Exit { node_id: NODE.into(), slot, pid, ended, sample: None });
    assert_eq!(respawns(&actions), [(2, 3)]);

    let mut by_hand = Run::new(patient());
    (0..2).for_each(|rank| come(&mut by_hand, rank));
    assert_eq!(named(&live(&mut by_hand, 50)), []);
}

#[test]
fn a_coordinator_that_was_restarted_meanwhile_waits_for_the_same_processes() {
    let mut mortal = Mortal::new(patient());
    mortal.keep(|run| run.tell(join(3)));
    mortal.keep(|run| run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE }));
    for rank in 0..2 {
        mortal.keep(|run| run.tell(Ask::Register(claim(rank))));
        mortal.reopen(rank);
    }
    mortal.kill_coordinator();
    mortal.keep(|run| run.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE }));
    for rank in 0..2 {
        mortal.reopen(rank);
        mortal.keep(|run| run.get_ready(rank, 0, ""));
    }
    let actions = mortal.keep(|run| live(run, 70));
    assert_eq!(respawns(&actions), [(2, 1)], "{:?}", named(&actions));
}
