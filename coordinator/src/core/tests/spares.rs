//! Spares: who has no rank, whose place it takes, and what that costs.

use super::{
    elastic::{come, join, members, pass, regroup},
    *,
};
use crate::{
    core::{event::ProcessExit, news::MemberChange, status::Status},
    options::Outcome,
};

/// Two ranks and a spare on one node, at step 10 of generation 1.
fn with_a_spare(restarts: u32, replace_slow: u64) -> Run {
    let mut config = config(3);
    config.world.spares = 1;
    config.budgets.restarts = restarts;
    config.faults.replace_slow = replace_slow;
    let mut run = Run::new(config);
    run.gather(3);
    for rank in 0..3 {
        run.get_ready(rank, 0, "");
    }
    assert_eq!(members(&run), [0, 1]);
    run.start_all(2, 0, StateSource::Fresh);
    run.steps(0, 0..10);
    run.steps(1, 0..10);
    assert_eq!(run.committed(), 10);
    run
}

/// Steps as far as leases go at a time.
fn train_to_the_end(run: &mut Run) {
    for first in (10..100).step_by(10) {
        run.steps(0, first..first + 10);
        run.steps(1, first..first + 10);
    }
    assert_eq!(run.committed(), 100);
}

fn status(run: &mut Run) -> Status {
    run.status()
}

fn spares(run: &mut Run) -> Vec<u32> {
    let status = status(run);
    let of = |rank: &crate::core::status::RankStatus| rank.worker().is_some_and(|worker| worker.spare);
    let spares: Vec<_> = status.ranks.iter().filter(|rank| of(rank)).map(|rank| rank.slot.0).collect();
    assert_eq!(status.workers.spare as usize, spares.len());
    spares
}

fn who_stands_in(actions: &[Action]) -> Vec<u32> {
    let came = news(actions).into_iter().filter_map(|news| match news {
        News::Member { change: MemberChange::StandsIn { slot }, .. } => Some(slot.0),
        _ => None,
    });
    came.collect()
}

#[test]
fn the_last_slots_are_spares() {
    let mut run = with_a_spare(3, 0);
    assert_eq!(spares(&mut run), [2]);
    assert_eq!(status(&mut run).workers.present, 3);
}

#[test]
fn a_world_whose_spares_do_not_come_begins_without_them_after_the_last_call() {
    let mut config = config(3);
    config.world.spares = 1;
    let mut run = Run::new(config);
    run.gather(2);
    run.get_ready(0, 0, "");
    run.get_ready(1, 0, "");
    assert_eq!(members(&run), [0u32; 0]);
    pass(&mut run, 31);
    assert_eq!(members(&run), [0, 1]);
    run.start_all(2, 0, StateSource::Fresh);
    // One that comes late is a spare, and disturbs nobody.
    let actions = come(&mut run, 2);
    assert!(told(&actions, 0).is_empty(), "{actions:?}");
    assert_eq!(spares(&mut run), [2]);
}

#[test]
fn a_spare_has_the_place_of_a_lost_rank_before_its_successor_is_there() {
    let mut run = with_a_spare(3, 0);
    let actions = run.kill(1);
    assert_eq!(respawns(&actions), [(1, 1)]);
    assert_eq!(members(&run), [0u32; 0], "rank 0 has its part of the state, and is waited for");
    let actions = run.get_ready(0, 1, "");
    assert_eq!((members(&run), who_stands_in(&actions)), (vec![0, 2], vec![2]));
    assert_eq!(spares(&mut run), [0u32; 0]);
    for rank in [0, 2] {
        run.start(rank, 10, StateSource::Replica).0.expect("it is a member");
    }
    run.steps(0, 10..12);
    run.steps(2, 10..12);
    assert_eq!(run.committed(), 12);
    // The successor is a spare in its turn.
    let actions = run.replace(1, 1);
    assert!(told(&actions, 0).is_empty(), "nobody is disturbed: {actions:?}");
    assert_eq!(spares(&mut run), [1]);
    run.kill(0);
    let actions = run.get_ready(2, 2, "");
    assert_eq!((members(&run), who_stands_in(&actions)), (vec![1, 2], vec![1]));
}

#[test]
fn a_world_without_a_spare_that_is_ready_waits_for_the_successor() {
    let mut run = with_a_spare(3, 0);
    run.kill(2);
    run.kill(1);
    run.get_ready(0, 1, "");
    pass(&mut run, 6);
    assert_eq!(members(&run), [0u32; 0]);
    let actions = run.replace(1, 1);
    assert_eq!((members(&run), who_stands_in(&actions)), (vec![0, 1], vec![]));
}

#[test]
fn a_spare_makes_up_for_restarts_that_are_used_up() {
    let mut run = with_a_spare(0, 0);
    let actions = run.kill(1);
    assert!(respawns(&actions).is_empty(), "{actions:?}");
    run.get_ready(0, 1, "");
    assert_eq!(members(&run), [0, 2]);
    assert_eq!(status(&mut run).spent.restarts, 0);
    for rank in [0, 2] {
        run.start(rank, 10, StateSource::Replica).0.expect("it is a member");
    }
    // There is none for the next.
    run.kill(2);
    assert!(run.machine.run.faults.closing().is_some());
}

#[test]
fn a_spare_that_is_lost_ends_nothing() {
    for (restarts, asked) in [(0, vec![]), (1, vec![(2, 1)])] {
        let mut run = with_a_spare(restarts, 0);
        let actions = run.kill(2);
        assert_eq!(respawns(&actions), asked);
        assert!(told(&actions, 0).is_empty(), "{actions:?}");
        run.steps(0, 10..12);
        run.steps(1, 10..12);
        assert_eq!((run.committed(), spares(&mut run)), (12, vec![]));
    }
}

#[test]
fn a_rank_whose_slot_is_cordoned_is_replaced_though_the_world_is_fixed() {
    let mut run = with_a_spare(3, 0);
    let (worker, text) = (run.worker(1), "its gradients are wrong".to_owned());
    for sequence in 1..3 {
        run.tell(Ask::Note { worker, sequence, text: text.clone(), hardware: true });
    }
    run.get_ready(0, 1, "");
    assert_eq!(members(&run), [0, 2]);
    assert_eq!(status(&mut run).spent.restarts, 0, "nothing was started again");
}

#[test]
fn a_node_of_spares_has_the_place_of_one_that_is_gone() {
    let mut config = config(2);
    config.world = World { min_nodes: 3, max_nodes: 3, nproc_per_node: 1, spares: 1 };
    let mut run = Run::new(config);
    (0..3).for_each(|node| join(&mut run, node));
    for rank in 0..3 {
        come(&mut run, rank);
    }
    run.start_all(2, 0, StateSource::Fresh);
    run.event(Event::NodeLineClosed("node-1".into(), StreamId(6001)));
    run.event(Event::LineClosed(id(1), StreamId(1)));
    run.wait(Duration::from_secs(1));
    run.get_ready(0, 1, "");
    assert_eq!(members(&run), [0, 2]);
}

#[test]
fn a_node_can_be_drained_where_spares_make_up_for_it() {
    let mut config = config(2);
    config.world = World { min_nodes: 2, max_nodes: 2, nproc_per_node: 2, spares: 2 };
    let mut run = Run::new(config);
    (0..2).for_each(|node| join(&mut run, node));
    (0..4).for_each(|rank| drop(come(&mut run, rank)));
    assert_eq!(members(&run), [0, 1]);
    run.start_all(2, 0, StateSource::Fresh);
    let node = crate::core::event::NodeName::Place(0);
    let (reply, actions) = run.ask(Ask::Drain { node, reason: "asked to".into() });
    assert_eq!(reply, Ok(Reply::Drained(0)));
    assert_eq!(told(&actions, 0), [&regroup(1, true)]);
    run.get_ready(0, 1, "");
    run.get_ready(1, 1, "");
    assert_eq!(members(&run), [2, 3]);
    let other = crate::core::event::NodeName::Place(1);
    let refused = run.ask(Ask::Drain { node: other, reason: "asked to".into() }).0;
    assert!(matches!(refused, Err(Refusal::Needed { .. })), "{refused:?}");
}

#[test]
fn spares_leave_in_order_when_the_run_is_at_its_end() {
    let mut run = with_a_spare(3, 0);
    train_to_the_end(&mut run);
    let mut leave = |rank| {
        let worker = run.worker(rank);
        run.tell(Ask::Leave { worker, exit_code: 0, reason: "done".into() })
    };
    leave(0);
    let actions = leave(1);
    assert!(matches!(told(&actions, 2)[..], [Directive::Dismiss(_)]), "{actions:?}");
    leave(2);
    assert_eq!(run.machine.outcome(), Some(Outcome::Finished { steps: Step(100) }));
}

#[test]
fn a_spare_that_missed_the_end_is_told_when_it_is_back() {
    let mut run = with_a_spare(3, 0);
    train_to_the_end(&mut run);
    run.event(Event::LineClosed(run.worker(2), StreamId(2)));
    for rank in 0..2 {
        let worker = run.worker(rank);
        run.tell(Ask::Leave { worker, exit_code: 0, reason: "done".into() });
    }
    let (_, actions) = run.follow(2, 77);
    assert!(matches!(told(&actions, 77)[..], [Directive::Dismiss(_), ..]), "{actions:?}");
}

/// Steps in which rank 1 takes 1.4 times as long as rank 0.
fn slow_steps(run: &mut Run, steps: std::ops::Range<u64>) -> Vec<Action> {
    let mut actions = Vec::new();
    for step in steps {
        for rank in 0..2 {
            let mut report = run.report(rank, step);
            report.times.total = Duration::from_millis(if rank == 1 { 140 } else { 100 });
            actions.extend(run.tell(Ask::Steps(run.worker(rank), vec![report])));
        }
    }
    actions
}

#[test]
fn a_rank_that_stays_slow_gives_its_place_to_a_spare() {
    let mut run = with_a_spare(3, 1);
    // Named with 12 slow steps of a window, and 20 steps later replaced.
    let actions = slow_steps(&mut run, 10..40);
    assert!(news(&actions).iter().any(|news| matches!(news, News::Slow(Slot(1), Some(_)))), "{actions:?}");
    assert!(told(&actions, 0).iter().all(|directive| matches!(directive, Directive::Lease(_))));
    let actions = slow_steps(&mut run, 40..50);
    let aside = |news: &&&News| matches!(news, News::SetAside(Slot(1), _));
    assert_eq!(news(&actions).iter().filter(aside).count(), 1);
    assert!(told(&actions, 0).contains(&&regroup(1, true)), "{actions:?}");
    run.get_ready(0, 1, "");
    run.get_ready(1, 1, "");
    assert_eq!((members(&run), spares(&mut run)), (vec![0, 2], vec![1]));
    assert_eq!(status(&mut run).spent.restarts, 0);
    for rank in [0, 2] {
        run.start(rank, 50, StateSource::Checkpoint).0.expect("it is a member");
    }
    // A slow one is better than none.
    run.kill(2);
    run.get_ready(0, 2, "");
    assert_eq!(members(&run), [0, 1]);
}

#[test]
fn a_slow_rank_keeps_its_place_where_no_spare_is_there_or_none_is_to_have_it() {
    for (replace_slow, lost) in [(0, false), (1, true)] {
        let mut run = with_a_spare(0, replace_slow);
        if lost {
            let pid = Some(102);
            let ended = ProcessExit::Signal(9);
            run.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(2), pid, ended, sample: None });
        }
        let actions = slow_steps(&mut run, 10..90);
        assert!(told(&actions, 0).iter().all(|directive| matches!(directive, Directive::Lease(_))));
        assert_eq!((run.committed(), members(&run)), (90, vec![0, 1]));
    }
}
