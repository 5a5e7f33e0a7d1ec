//! Ranks that stand still: in a step, while the ring is formed, before any step's time is known, before a boundary that was asked for.

use super::{
    recovery::{at_step_ten, survived},
    *,
};

/// Seconds in which rank 0 waits in a collective and rank 1 is in a phase.
fn stand_still(run: &mut Run, seconds: u64, phase: WorkerPhase) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..seconds {
        actions.extend(run.wait(Duration::from_secs(1)));
        for (rank, phase) in [(0, WorkerPhase::Communication), (1, phase)] {
            if run.machine.roster.living_at(Seat(rank)).is_some() {
                actions.extend(run.beat(rank, phase));
            }
        }
    }
    actions
}

#[test]
fn a_rank_that_stands_still_is_named_with_its_phase() {
    let mut run = at_step_ten();
    let actions = stand_still(&mut run, 12, WorkerPhase::Backward);
    let text = survived(&actions).unwrap();
    assert!(
        text.starts_with("rank 1 on node-a") && text.contains("stands still: backward of step 0"),
        "{text}"
    );
    assert!(text.contains("while 1 ranks wait in collective 3"), "{text}");
    assert_eq!(respawns(&actions), [(1, 1)]);
}

#[test]
fn what_may_last_is_not_a_standstill() {
    for phase in [WorkerPhase::Checkpoint, WorkerPhase::Evaluation, WorkerPhase::CacheBuild] {
        let mut run = at_step_ten();
        assert_eq!(survived(&stand_still(&mut run, 120, phase)), None, "{phase}");
    }
    let mut run = at_step_ten();
    run.tell(Ask::Pause);
    assert_eq!(survived(&stand_still(&mut run, 120, WorkerPhase::Paused)), None);
}

#[test]
fn a_stuck_network_makes_all_ranks_try_again() {
    let mut run = at_step_ten();
    let actions = stand_still(&mut run, 12, WorkerPhase::Communication);
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    assert_eq!(respawns(&actions), []);
    run.get_ready(0, 1, "");
    let formed = run.get_ready(1, 1, "");
    assert_eq!(survived(&formed).unwrap(), "all ranks wait in collective 3, and nothing moves");
}

/// Seconds in which rank 0 waits for its neighbours and rank 1 is somewhere else, with collectives entered and finished.
fn wait_for_rank_one(run: &mut Run, seconds: u64, at: (WorkerPhase, (u64, u64))) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..seconds {
        actions.extend(run.wait(Duration::from_secs(1)));
        let waits = match run.machine.run_phase() {
            RunPhase::Starting if at.0 == WorkerPhase::Connecting => WorkerPhase::Connecting,
            _ => WorkerPhase::Communication,
        };
        for (rank, (phase, collective)) in [(0, (waits, (1, 0))), (1, at)] {
            if run.machine.roster.living_at(Seat(rank)).is_some() {
                actions.extend(run.beat_at(rank, phase, collective));
            }
        }
    }
    actions
}

/// Two workers that were assigned and have not said where they start.
fn connecting() -> Run {
    let mut run = Run::new(config(2));
    run.gather(2);
    run.get_ready(0, 0, "");
    run.get_ready(1, 0, "");
    run
}

#[test]
fn a_rank_that_never_calls_its_neighbours_is_named_and_replaced() {
    let mut run = connecting();
    let actions = wait_for_rank_one(&mut run, 16, (WorkerPhase::Connecting, (0, 0)));
    let text = survived(&actions).expect("it is found");
    assert!(text.starts_with("rank 1 on node-a, connect") && text.contains("nothing moved for"), "{text}");
    assert_eq!(respawns(&actions), [(1, 1)]);
    assert_eq!(told(&actions, 0).len(), 1, "and rank 0 gets ready for another generation: {actions:?}");
}

#[test]
fn a_rank_that_stands_still_before_any_step_is_committed_is_named() {
    let mut run = connecting();
    run.start_all(2, 0, StateSource::Fresh);
    let actions = wait_for_rank_one(&mut run, 14, (WorkerPhase::Forward, (0, 0)));
    let text = survived(&actions).expect("it is found");
    assert!(text.contains("stands still: forward of step 0"), "{text}");
}

#[test]
fn a_rank_that_takes_its_time_while_nobody_waits_is_left_alone() {
    let mut run = connecting();
    run.start_all(2, 0, StateSource::Fresh);
    for _ in 0..120 {
        run.wait(Duration::from_secs(1));
        let beats = [run.beat(0, WorkerPhase::Forward), run.beat(1, WorkerPhase::Forward)];
        assert_eq!(survived(&beats.concat()), None);
    }
    // Rank 0 needed two minutes; so may rank 1.
    assert_eq!(survived(&wait_for_rank_one(&mut run, 100, (WorkerPhase::Forward, (0, 0)))), None);
}

#[test]
fn a_state_that_is_read_from_disk_may_last() {
    let mut run = connecting();
    assert_eq!(survived(&wait_for_rank_one(&mut run, 120, (WorkerPhase::Checkpoint, (1, 1)))), None);
}

#[test]
fn a_rank_that_does_not_reach_the_boundary_that_was_asked_for_is_named() {
    use super::elastic::{come, join, one_node};
    let mut run = one_node();
    for step in 0..5 {
        run.steps(0, step..step + 1);
        run.steps(1, step..step + 1);
    }
    join(&mut run, 1);
    come(&mut run, 2);
    come(&mut run, 3);
    let mut actions = Vec::new();
    for _ in 0..13 {
        actions.extend(run.wait(Duration::from_secs(1)));
        let all = [
            (0, WorkerPhase::Communication),
            (1, WorkerPhase::Backward),
            (2, WorkerPhase::Joining),
            (3, WorkerPhase::Joining),
        ];
        for (rank, phase) in all {
            if run.machine.roster.living_at(Seat(rank)).is_some() {
                actions.extend(run.beat(rank, phase));
            }
        }
    }
    assert!(survived(&actions).is_some_and(|text| text.contains("stands still: backward")), "{actions:?}");
}
