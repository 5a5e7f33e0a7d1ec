//! Worlds that grow and shrink.

use super::*;
use crate::core::event::ProcessExit;

/// Two nodes at most, one at least, two workers each.
pub(super) fn elastic() -> Run {
    let mut config = config(2);
    config.world = World { min_nodes: 1, max_nodes: 2, nproc_per_node: 2, spares: 0 };
    Run::new(config)
}

pub(super) fn join(run: &mut Run, node: u32) {
    let local_world = run.machine.run.config.world.nproc_per_node;
    let node_id = format!("node-{node}");
    run.tell(Ask::JoinNode(NodeClaim {
        origin: origin(),
        node_id: node_id.clone(),
        host: format!("host-{node}"),
        local_world,
        node_rank: None,
        returns: false,
    }));
    run.tell(Ask::FollowNode { node_id, stream: StreamId(6000 + u64::from(node)) });
}

pub(super) fn come(run: &mut Run, rank: u32) -> Vec<Action> {
    run.tell(Ask::Register(claim(rank)));
    drop(run.follow(rank, u64::from(rank)));
    run.get_ready(rank, 0, "")
}

pub(super) fn members(run: &Run) -> Vec<u32> {
    match &run.machine.run.phase {
        crate::core::phase::Phase::Running(running) => {
            running.assignment.members.iter().map(|member| member.slot.0).collect()
        }
        _ => Vec::new(),
    }
}

/// A run of one node that trains, because the last call was over before another came.
pub(super) fn one_node() -> Run {
    let mut run = elastic();
    join(&mut run, 0);
    come(&mut run, 0);
    come(&mut run, 1);
    assert_eq!(members(&run), [0u32; 0]);
    pass(&mut run, 31);
    assert_eq!(members(&run), [0, 1]);
    run.start_all(2, 0, StateSource::Fresh);
    run
}

/// A run of both nodes that trains.
pub(super) fn both_nodes() -> Run {
    let mut run = elastic();
    join(&mut run, 0);
    join(&mut run, 1);
    for rank in 0..4 {
        come(&mut run, rank);
    }
    run.start_all(4, 0, StateSource::Fresh);
    run
}

pub(super) fn regroup(generation: u64, checkpoint: bool) -> Directive {
    Directive::Regroup { generation: Generation(generation), checkpoint }
}

/// Seconds in which everyone heartbeats.
pub(super) fn pass(run: &mut Run, seconds: u64) {
    for _ in 0..seconds {
        run.wait(Duration::from_secs(1));
        for rank in 0..4 {
            if run.machine.run.fleet.roster.living_at(Slot(rank)).is_some() {
                run.beat(rank, WorkerPhase::Forward);
            }
        }
    }
}

#[test]
fn a_full_world_begins_at_once() {
    let mut run = elastic();
    join(&mut run, 0);
    join(&mut run, 1);
    for rank in 0..4 {
        come(&mut run, rank);
    }
    assert_eq!(members(&run), [0, 1, 2, 3]);
}

#[test]
fn replicas_are_on_another_node_as_far_as_there_is_room() {
    let placed = |run: &Run| {
        let running = run.machine.run.phase.running().expect("a generation");
        (running.assignment.replicas.distance, run.machine.run.voice.reason.to_string())
    };
    let mut run = elastic();
    join(&mut run, 0);
    join(&mut run, 1);
    (0..4).for_each(|rank| drop(come(&mut run, rank)));
    assert_eq!(placed(&run), (2, "generation 1 is connecting (world size 4)".into()));
    // Slot 3 does not come back: three are left, of which one node has two.
    run.start_all(4, 0, StateSource::Fresh);
    run.event(Event::LineClosed(id(3), StreamId(3)));
    pass(&mut run, 1);
    (0..3).for_each(|rank| drop(run.get_ready(rank, 1, "")));
    pass(&mut run, 6);
    let told = "generation 2 is connecting (world size 3); most workers are on one node, which also holds \
                the replicas of 1 of its own shards: losing that node costs the steps since the last \
                checkpoint";
    assert_eq!(placed(&run), (1, told.into()));
    // On one node there is no other, and without replicas there is nothing to tell.
    for replica in [true, false] {
        let mut run = Run::new(Config { faults: Faults { replica, ..Faults::default() }, ..config(2) });
        run.gather(2);
        (0..2).for_each(|rank| drop(run.get_ready(rank, 0, "")));
        assert_eq!(placed(&run), (1, "generation 1 is connecting (world size 2)".into()));
    }
}

#[test]
fn people_are_told_how_many_are_enough() {
    let mut run = elastic();
    come(&mut run, 0);
    let told = |run: &Run| run.machine.run.voice.reason.to_string();
    assert_eq!(told(&run), "1 of 4 workers have joined; at least 2 are needed");
    pass(&mut run, 61);
    assert_eq!(told(&run), "only 1 of the required minimum of 2 workers joined within 60 s");
    assert_eq!(Run::new(config(3)).machine.run.voice.reason.to_string(), "0 of 3 workers have joined");
}

#[test]
fn the_fewest_begin_when_the_last_call_is_over() {
    one_node();
}

#[test]
fn a_node_that_joins_is_taken_in_at_a_boundary() {
    let mut run = one_node();
    run.steps(0, 0..5);
    run.steps(1, 0..5);
    join(&mut run, 1);
    assert_eq!(told(&come(&mut run, 2), 0), [&regroup(1, false)]);
    come(&mut run, 3);
    run.get_ready(0, 1, "");
    assert_eq!(members(&run), [0u32; 0]);
    let formed = run.get_ready(1, 1, "");
    assert_eq!(members(&run), [0, 1, 2, 3]);
    assert!(matches!(told(&formed, 3)[..], [Directive::Assignment(_, Rank(3))]));
    run.start_all(4, 5, StateSource::Carried);
    let status = run.status();
    assert_eq!((status.spent.restarts, status.spent.rescales), (0, 1));
}

#[test]
fn a_lost_worker_is_waited_for_and_then_done_without() {
    let mut run = one_node();
    let mut config = config(2);
    config.world = World { min_nodes: 1, max_nodes: 3, nproc_per_node: 1, spares: 0 };
    drop(std::mem::replace(&mut run, Run::new(config)));
    (0..2).for_each(|node| join(&mut run, node));
    come(&mut run, 0);
    come(&mut run, 1);
    pass(&mut run, 31);
    run.start_all(2, 0, StateSource::Fresh);
    run.event(Event::LineClosed(id(1), StreamId(1)));
    pass(&mut run, 1);
    run.get_ready(0, 1, "");
    pass(&mut run, 3);
    assert_eq!(members(&run), [0u32; 0]);
    pass(&mut run, 3);
    assert_eq!(members(&run), [0]);
    run.start_all(1, 0, StateSource::Replica);
    // Its successor comes late, and is taken in.
    run.steps(0, 0..1);
    let actions = run.replace(1, 1);
    assert_eq!(told(&actions, 0), [&regroup(2, false)]);
}

#[test]
fn a_rank_is_a_position_and_a_slot_is_a_place() {
    let mut run = both_nodes();
    for rank in 0..4 {
        run.steps(rank, 0..2);
    }
    // Node 0 goes, with slots 0 and 1.
    run.event(Event::NodeLineClosed("node-0".into(), StreamId(6000)));
    for rank in 0..2 {
        run.event(Event::LineClosed(id(rank), StreamId(u64::from(rank))));
    }
    pass(&mut run, 1);
    run.get_ready(2, 1, "");
    run.get_ready(3, 1, "");
    pass(&mut run, 3);
    assert_eq!(members(&run), [2, 3]);
    for slot in 2..4 {
        drop(run.start(slot, 2, StateSource::Replica));
    }
    for slot in 2..4 {
        run.steps(slot, 2..3);
    }
    assert_eq!(run.committed(), 3);
}

#[test]
fn a_worker_that_leaves_on_purpose_makes_the_world_smaller() {
    let mut run = both_nodes();
    for rank in 2..4 {
        run.tell(Ask::Leave { worker: id(rank), exit_code: 0, reason: "preempted".into() });
    }
    run.get_ready(0, 1, "");
    run.get_ready(1, 1, "");
    pass(&mut run, 6);
    assert_eq!(members(&run), [0, 1]);
    let status = run.status();
    assert_eq!(status.spent.restarts, 0);
}

#[test]
fn the_budget_for_rescaling_is_its_own() {
    let mut run = one_node();
    run.machine.run.config.budgets.rescales = Some(0);
    join(&mut run, 1);
    come(&mut run, 2);
    let actions = come(&mut run, 3);
    assert_eq!(told(&actions, 0), [] as [&Directive; 0]);
}

fn exit(run: &mut Run, node: u32, slot: u32, (pid, ended): (u32, ProcessExit)) -> Vec<Action> {
    run.tell(Ask::Exit {
        node_id: format!("node-{node}"),
        slot: Slot(slot),
        pid: Some(pid),
        ended,
        sample: None,
    })
}

#[test]
fn a_node_that_joins_without_its_data_costs_the_others_nothing() {
    let mut run = one_node();
    (0..2).for_each(|rank| drop(run.steps(rank, 0..5)));
    join(&mut run, 1);
    for pid in 900..905 {
        let actions = exit(&mut run, 1, 2 + pid % 2, (pid, ProcessExit::Code(3)));
        assert!(matches!(news(&actions)[..], [News::LostOutside(..)]), "{actions:?}");
        let asked = |action: &&Action| matches!(action, Action::TellNode(..));
        assert_eq!(actions.iter().find(asked), None, "the next one would fail alike");
    }
    assert_eq!((members(&run), run.machine.run.faults.spent.restarts), (vec![0, 1], 0));
}

#[test]
fn a_lost_worker_whose_machine_cannot_bring_it_back_is_done_without() {
    let mut run = both_nodes();
    (0..4).for_each(|rank| drop(run.steps(rank, 0..5)));
    exit(&mut run, 1, 3, (103, ProcessExit::Signal(9)));
    (0..3).for_each(|rank| drop(run.get_ready(rank, 1, "")));
    for pid in 900..905 {
        exit(&mut run, 1, 3, (pid, ProcessExit::Code(2)));
    }
    pass(&mut run, 6);
    assert_eq!((members(&run), run.machine.run.faults.spent.restarts), (vec![0, 1, 2], 1));
}

#[test]
fn a_newcomer_that_is_lost_disturbs_nobody() {
    let mut run = one_node();
    join(&mut run, 1);
    run.tell(Ask::Register(claim(2)));
    drop(run.follow(2, 2));
    let lost = run.event(Event::LineClosed(id(2), StreamId(2)));
    let lost = [lost, run.wait(Duration::from_secs(1))].concat();
    let told = |told: &&&News| matches!(told, News::LostOutside(..) | News::Failure(..));
    let news = news(&lost);
    assert!(matches!(news.iter().filter(told).collect::<Vec<_>>()[..], [News::LostOutside(..)]), "{news:?}");
    assert_eq!(members(&run), [0, 1]);
}
