//! A new launch in the place of an earlier one, which was killed with its coordinator.

use super::{
    elastic::{come, members},
    mortal::{Mortal, wants},
    *,
};

/// The launch of two workers on one node is killed at step ten, and launched again on `host`.
fn launched_again_on(host: &str) -> Mortal {
    let mut mortal = Mortal::at_step_ten();
    mortal.keep(|run| run.kill(1));
    mortal.run.machine.run.config.budgets.restarts = 0;
    mortal.begin_life(false);
    let (reply, _) = mortal.run.ask(wants("tomorrow", host, None, 2));
    assert_eq!(reply, Ok(Reply::Placed { node_rank: 0, first: Slot(0) }), "the only place there is");
    mortal
}

/// Seconds in which these ranks heartbeat.
fn live(mortal: &mut Mortal, ranks: std::ops::Range<u32>, seconds: u32) {
    for _ in 0..seconds {
        mortal.keep(|run| run.wait(Duration::from_secs(1)));
        for rank in ranks.clone() {
            mortal.keep(|run| run.beat(rank, WorkerPhase::Forward));
        }
    }
}

fn goes_on_from_the_checkpoint(mut mortal: Mortal) {
    mortal.ask(Ask::FollowNode { node_id: "tomorrow".into(), stream: NODE_LINE });
    for rank in 0..2 {
        mortal.keep(|run| run.replace(rank, 7));
    }
    let started = mortal.keep(|run| run.start_all(2, 4, StateSource::Checkpoint));
    assert!(news(&started).contains(&&News::RolledBack { from: Step(10), to: Step(4) }));
    assert_eq!((mortal.run.machine.run.faults.spent.restarts, mortal.run.phase()), (0, RunPhase::Starting));
    mortal.keep(|run| run.wait(Duration::from_millis(2500)));
    assert_eq!(mortal.run.phase(), RunPhase::Starting, "nobody of the earlier launch is missed");
}

#[test]
fn a_new_launch_in_the_old_place_begins_with_its_own_workers_and_budget() {
    goes_on_from_the_checkpoint(launched_again_on("node-a"));
}

#[test]
fn a_new_launch_on_another_machine_gets_the_place_of_the_old_one() {
    goes_on_from_the_checkpoint(launched_again_on("node-b"));
}

/// Two nodes of one worker each, whose places are fixed, at step ten.
fn two_nodes() -> Mortal {
    let mut config = config(1);
    (config.world, config.budgets.restarts) = (World::fixed(2, 1), 0);
    let mut mortal = Mortal::new(config);
    for rank in 0..2 {
        let node_id = format!("node-{rank}");
        mortal.ask(wants(&node_id, &format!("host-{rank}"), Some(rank), 1));
        mortal.ask(Ask::FollowNode { node_id, stream: StreamId(6000 + u64::from(rank)) });
    }
    mortal.train_to_ten();
    mortal
}

#[test]
fn machines_that_outlive_the_coordinators_launcher_keep_their_workers_and_pay_nothing() {
    let mut mortal = two_nodes();
    mortal.begin_life(false);
    assert!(mortal.run.ask(wants("again", "elsewhere", Some(0), 1)).0.is_ok());
    mortal.ask(Ask::FollowNode { node_id: "again".into(), stream: NODE_LINE });
    mortal.ask(Ask::FollowNode { node_id: "node-1".into(), stream: StreamId(7001) });
    // The survivor is told that its generation is over, keeps its process, and is in the next one.
    let told_survivor = mortal.reopen(1);
    let aborted = |action: &Action| matches!(action, Action::Tell(_, Directive::Abort { over: false, .. }));
    assert!(told_survivor.iter().any(aborted), "{told_survivor:?}");
    mortal.keep(|run| run.get_ready(1, 1, ""));
    mortal.keep(|run| run.replace(0, 1));
    mortal.keep(|run| run.start_all(2, 10, StateSource::Replica));
    assert_eq!((mortal.run.machine.run.faults.spent.restarts, mortal.run.phase()), (0, RunPhase::Starting));
    assert_eq!(mortal.run.worker(1), WorkerId((1 << 32) + 2), "the same worker");
}

#[test]
fn a_machine_that_is_launched_again_when_the_results_are_there_ends_the_run() {
    let mut mortal = two_nodes();
    mortal.ask(Ask::Stop { reason: "enough".into() });
    mortal.begin_life(false);
    mortal.ask(Ask::FollowNode { node_id: "node-1".into(), stream: StreamId(7001) });
    mortal.reopen(1);
    let worker = mortal.run.worker(1);
    mortal.ask(Ask::Leave { worker, exit_code: 0, reason: "stopped".into() });
    assert_ne!(mortal.run.phase(), RunPhase::Finished, "the other rank is waited for");
    mortal.ask(wants("again", "host-0", Some(0), 1));
    assert_eq!(mortal.run.phase(), RunPhase::Finished, "who has left in order would not come again");
}

#[test]
fn launchers_that_all_come_from_elsewhere_take_the_places_they_name() {
    let mut mortal = two_nodes();
    mortal.begin_life(false);
    for place in [1, 0] {
        let id = format!("again-{place}");
        let (reply, _) = mortal.run.ask(wants(&id, "elsewhere", Some(place), 1));
        assert!(reply.is_ok(), "{reply:?}");
        mortal.ask(Ask::FollowNode { node_id: id, stream: StreamId(7000 + u64::from(place)) });
        mortal.keep(|run| run.replace(place, 1));
    }
    mortal.keep(|run| run.start_all(2, 0, StateSource::Checkpoint));
    assert_eq!((mortal.run.machine.run.faults.spent.restarts, mortal.run.phase()), (0, RunPhase::Starting));
}

#[test]
fn a_place_that_nobody_names_is_kept_until_the_reunion_is_over_and_costs_nothing() {
    let mut mortal = two_nodes();
    mortal.begin_life(false);
    let ask = |mortal: &mut Mortal| mortal.run.ask(wants("again", "elsewhere", None, 1));
    let (reply, actions) = ask(&mut mortal);
    assert_eq!(reply, Err(Refusal::PlaceKept { node_rank: 0, host: "host-0".into() }));
    assert!(news(&actions).is_empty(), "it asks again: that is no news");
    mortal.keep(|run| run.wait(Duration::from_secs(11)));
    assert_eq!(ask(&mut mortal).0, Ok(Reply::Placed { node_rank: 0, first: Slot(0) }));
    let machine = &mortal.run.machine;
    assert_eq!((machine.run.faults.spent.restarts, machine.run_phase()), (0, RunPhase::WaitingForWorkers));
}

#[test]
fn a_coordinator_that_was_started_again_gives_no_place_away_before_the_reunion_is_over() {
    let mut mortal = two_nodes();
    mortal.begin_life(true);
    let (reply, _) = mortal.run.ask(wants("surplus", "elsewhere", Some(1), 1));
    assert_eq!(reply, Err(Refusal::PlaceKept { node_rank: 1, host: "host-1".into() }));
    mortal.ask(Ask::FollowNode { node_id: "node-1".into(), stream: NODE_LINE });
    let (reply, _) = mortal.run.ask(wants("surplus", "elsewhere", Some(1), 1));
    assert_eq!(reply, Err(Refusal::NodeRankTaken { node_rank: 1, host: "host-1".into() }));
}

#[test]
fn an_elastic_world_that_is_launched_again_elsewhere_forgets_the_one_before() {
    let mut config = config(2);
    config.world = World { min_nodes: 1, max_nodes: 2, nproc_per_node: 2, spares: 0 };
    config.budgets.restarts = 0;
    let mut mortal = Mortal::new(config);
    mortal.ask(wants("node-0", "host-0", None, 2));
    mortal.ask(Ask::FollowNode { node_id: "node-0".into(), stream: NODE_LINE });
    for rank in 0..2 {
        mortal.keep(|run| come(run, rank));
    }
    live(&mut mortal, 0..2, 31);
    assert_eq!(members(&mortal.run), [0, 1]);
    mortal.begin_life(false);
    let (reply, _) = mortal.run.ask(wants("again", "elsewhere", None, 2));
    assert!(matches!(reply, Ok(Reply::Placed { .. })), "{reply:?}");
    mortal.ask(Ask::FollowNode { node_id: "again".into(), stream: NODE_LINE });
    let first = if let Ok(Reply::Placed { first, .. }) = reply { first.0 } else { 0 };
    for rank in first..first + 2 {
        mortal.keep(|run| come(run, rank));
    }
    live(&mut mortal, first..first + 2, 45);
    assert_eq!(members(&mortal.run), [first, first + 1]);
    assert_eq!(mortal.run.machine.run.faults.spent.restarts, 0);
}
