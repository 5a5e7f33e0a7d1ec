//! Nodes that leave an elastic world because they were asked to.

use super::{
    elastic::{both_nodes, come, elastic, join, members, pass, regroup},
    *,
};
use crate::core::event::{CheckpointReport, CheckpointState, NodeName, ProcessExit};

/// Two nodes of two workers each that train, and have committed three steps.
fn two_nodes() -> Run {
    let mut run = both_nodes();
    for rank in 0..4 {
        run.steps(rank, 0..3);
    }
    run
}

fn drain(run: &mut Run, place: u32) -> (Result<Reply, Refusal>, Vec<Action>) {
    run.ask(Ask::Drain { node: NodeName::Place(place), reason: "SIGTERM".into() })
}

fn dismissed(actions: &[Action], rank: u64) -> bool {
    matches!(told(actions, rank).last(), Some(Directive::Dismiss(_)))
}

fn leave(run: &mut Run, rank: u32) -> Vec<Action> {
    run.tell(Ask::Leave { worker: run.worker(rank), exit_code: 0, reason: "done".into() })
}

#[test]
fn the_others_train_on_from_the_boundary_and_the_node_may_come_back() {
    let mut run = two_nodes();
    let (reply, actions) = drain(&mut run, 1);
    assert_eq!(reply, Ok(Reply::Drained(1)));
    for rank in 0..4 {
        assert_eq!(
            told(&actions, rank),
            [&regroup(1, true)],
            "all leave at one boundary, after a checkpoint"
        );
    }
    assert_eq!(drain(&mut run, 1), (Ok(Reply::Drained(1)), vec![]), "asking twice is asking once");
    run.get_ready(0, 1, "");
    assert!(dismissed(&run.get_ready(2, 1, ""), 2));
    assert!(dismissed(&run.get_ready(3, 1, ""), 3));
    assert_eq!(members(&run), [0u32; 0]);
    run.get_ready(1, 1, "");
    assert_eq!(members(&run), [0, 1]);
    for rank in 0..2 {
        run.start(rank, 3, StateSource::Carried).0.unwrap();
    }
    let actions = [leave(&mut run, 2), leave(&mut run, 3)].concat();
    assert!(told(&actions, 0).is_empty(), "{actions:?}");
    run.steps(0, 3..4);
    run.steps(1, 3..4);
    assert_eq!(run.committed(), 4);
    let status = run.status();
    assert_eq!((status.spent.restarts, status.spent.rescales), (0, 1));
    let leaving: Vec<_> = status.leaving.iter().map(|node| (node.place, node.workers)).collect();
    assert_eq!(leaving, [(1, 0)], "its launcher is still there");

    run.event(Event::NodeLineClosed("node-1".into(), StreamId(6001)));
    pass(&mut run, 4);
    assert_eq!(members(&run), [0, 1]);
    assert!(run.machine.run.orders.draining.is_empty(), "the node's next launcher is to stay");
    join(&mut run, 2);
    for rank in 2..4 {
        run.replace(rank, 1);
    }
    for rank in 0..2 {
        run.get_ready(rank, 2, "");
    }
    assert_eq!(members(&run), [0, 1, 2, 3]);
}

#[test]
fn a_node_that_is_needed_is_not_let_go() {
    let mut run = two_nodes();
    drain(&mut run, 1).0.unwrap();
    let (reply, actions) = drain(&mut run, 0);
    assert!(matches!(reply, Err(Refusal::Needed { node_rank: 0, .. })), "{reply:?}");
    assert!(told(&actions, 0).is_empty());
    assert_eq!(drain(&mut run, 7).0, Err(Refusal::NoNodeThere(7)));

    let mut fixed = Run::started(2);
    let (reply, _) = drain(&mut fixed, 0);
    assert!(matches!(reply, Err(Refusal::Needed { .. })), "{reply:?}");
}

#[test]
fn workers_that_were_lost_on_the_way_out_cost_no_restart_and_do_not_come_back() {
    let mut run = two_nodes();
    drain(&mut run, 1).0.unwrap();
    let pid = run.machine.run.fleet.roster.at(Slot(2)).map(|worker| worker.claim.pid);
    let exit = Ask::Exit {
        node_id: "node-1".into(),
        slot: Slot(2),
        pid,
        ended: ProcessExit::Signal(9),
        sample: None,
    };
    let actions = run.tell(exit);
    assert!(!actions.iter().any(|action| matches!(action, Action::TellNode(..))), "{actions:?}");
    // Rank 3 still has its part and rank 2's: it is a member once more.
    for rank in [0, 1, 3] {
        run.get_ready(rank, 1, "rank 2 is gone");
    }
    assert_eq!(members(&run), [0, 1, 3]);
    for rank in [0, 1, 3] {
        run.start(rank, 3, StateSource::Replica).0.unwrap();
    }
    for rank in [0, 1, 3] {
        run.get_ready(rank, 2, "");
    }
    assert_eq!(members(&run), [0, 1]);
    let status = run.status();
    assert_eq!(status.spent.restarts, 0);
}

#[test]
fn nobody_is_let_go_in_the_middle_of_a_recovery() {
    let mut run = two_nodes();
    let pid = run.machine.run.fleet.roster.at(Slot(0)).map(|worker| worker.claim.pid);
    run.tell(Ask::Exit {
        node_id: "node-0".into(),
        slot: Slot(0),
        pid,
        ended: ProcessExit::Signal(9),
        sample: None,
    });
    let (_, actions) = drain(&mut run, 1);
    assert!(!dismissed(&actions, 2));
    for rank in 1..4 {
        assert!(!dismissed(&run.get_ready(rank, 1, "rank 0 is gone"), u64::from(rank)));
    }
    let actions = run.replace(0, 1);
    assert_eq!(members(&run), [0, 1, 2, 3]);
    assert_eq!(told(&actions, 2).last(), Some(&&regroup(2, true)), "and then it is");
}

#[test]
fn a_worker_that_is_only_loading_leaves_at_once() {
    let mut run = elastic();
    join(&mut run, 0);
    join(&mut run, 1);
    for rank in 0..2 {
        come(&mut run, rank);
    }
    run.tell(Ask::Register(claim(2)));
    drop(run.follow(2, 2));
    let (_, actions) = drain(&mut run, 1);
    assert!(dismissed(&actions, 2));
    assert!(members(&run).is_empty(), "the last call is still open");
    pass(&mut run, 31);
    assert_eq!(members(&run), [0, 1]);
}

#[test]
fn a_generation_ends_when_another_process_takes_the_slot_of_a_member_that_was_to_go() {
    let mut run = two_nodes();
    for step in 3..100 {
        for rank in 0..4 {
            run.steps(rank, step..step + 1);
        }
    }
    let (_, actions) = drain(&mut run, 1);
    assert!(told(&actions, 0).is_empty(), "all leave soon");
    assert!(told(&leave(&mut run, 2), 0).is_empty(), "it may be the first of all");
    let actions = run.replace(2, 1);
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    for rank in [0, 1, 3] {
        run.get_ready(rank, 1, "rank 2 is gone");
    }
    assert_eq!(members(&run), [0, 1, 3], "rank 3 has its part of the state");
    for rank in [0, 1, 3] {
        run.start(rank, 100, StateSource::Carried).0.unwrap();
    }
    assert_eq!(
        phases(&[leave(&mut run, 0), leave(&mut run, 1), leave(&mut run, 3)].concat()),
        [RunPhase::Finished]
    );
}

#[test]
fn a_restarted_coordinator_remembers_who_is_to_go() {
    let mut run = two_nodes();
    let mut past = Past::default();
    for action in
        run.ask(Ask::Drain { node: NodeName::Launcher("node-1".into()), reason: "SIGTERM".into() }).1
    {
        if let Action::Record(record) = action {
            past.add_record(&record);
        }
    }
    assert_eq!(past.orders.draining, [1].into());
}

#[test]
fn a_checkpoint_of_the_boundary_is_what_the_rest_falls_back_to() {
    let mut run = two_nodes();
    drain(&mut run, 1).0.unwrap();
    let worker = run.worker(0);
    let (state, path) = (CheckpointState::Complete, "checkpoints/step-3".to_owned());
    run.tell(Ask::Checkpoint(worker, CheckpointReport { step: Step(3), state, path, bytes: Bytes(9) }));
    for rank in [0, 2, 3] {
        run.get_ready(rank, 1, "");
    }
    let actions = run.get_ready(1, 1, "");
    let Some(Directive::Assignment(assignment, _)) = told(&actions, 0).last() else { panic!("{actions:?}") };
    assert_eq!((assignment.world(), assignment.checkpoint), (2, Step(3)));
}
