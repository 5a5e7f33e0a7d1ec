//! Ranks that stand still: in a step, while the ring is formed, before any step's time is known, before a
//! boundary that was asked for.

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
            if run.machine.run.fleet.roster.living_at(Slot(rank)).is_some() {
                actions.extend(run.beat(rank, phase));
            }
        }
    }
    actions
}

/// The lines about ranks that stand still, without being lost for it yet.
fn warnings(actions: &[Action]) -> Vec<(u32, &str)> {
    let warnings = news(actions).into_iter().filter_map(|news| match news {
        News::Standstill(slot, text) => Some((slot.0, text.as_str())),
        _ => None,
    });
    warnings.collect()
}

#[test]
fn a_rank_that_stands_still_is_named_with_its_phase() {
    let mut run = at_step_ten();
    let actions = stand_still(&mut run, 10, WorkerPhase::Backward);
    let text = survived(&actions).unwrap();
    assert!(
        text.starts_with("rank 1 on node-a") && text.contains("no progress: backward of step 0"),
        "{text}"
    );
    assert!(text.contains("while 1 rank waits"), "{text}");
    assert_eq!(respawns(&actions), [(1, 1)]);
}

/// Phases that may last for minutes, of a generation that trains.
const LONG: [WorkerPhase; 3] = [WorkerPhase::Checkpoint, WorkerPhase::Evaluation, WorkerPhase::CacheBuild];

#[test]
fn a_rank_that_stands_still_in_what_may_last_is_named_within_ten_seconds_and_then_given_up() {
    for phase in LONG {
        let mut run = at_step_ten();
        // Somebody has been through it, in no time.
        run.beat(0, phase);
        run.beat(0, WorkerPhase::Communication);
        let before = stand_still(&mut run, 10, phase);
        let named = warnings(&before);
        assert!(
            matches!(named[..], [(1, text)] if text.contains(&format!("no progress: {phase}"))),
            "{named:?}"
        );
        assert_eq!(survived(&before), None, "it may be waiting for a disk");
        let after = stand_still(&mut run, 20, phase);
        let text = survived(&after).unwrap_or_else(|| panic!("{phase}: not given up"));
        assert!(text.contains(&format!("no progress: {phase}")), "{text}");
        assert_eq!(respawns(&after), [(1, 1)]);
    }
}

/// Seconds in which rank 0 waits and rank 1 is in a phase, with a sign of motion now and then.
fn move_slowly(run: &mut Run, seconds: u64, phase: WorkerPhase, apart: u64) -> Vec<Action> {
    let mut actions = Vec::new();
    for second in 0..seconds {
        actions.extend(run.wait(Duration::from_secs(1)));
        let still = Duration::from_secs(second % apart);
        let in_phase = Duration::from_secs(second);
        let beat = Beat { still, in_phase, ..run.moving_beat(1, phase, (2, 2)) };
        actions.extend(run.tell(Ask::Heartbeat(beat)));
        actions.extend(run.beat(0, WorkerPhase::Communication));
    }
    actions
}

#[test]
fn what_lasts_and_moves_is_not_a_standstill() {
    for phase in LONG {
        let mut run = at_step_ten();
        let actions = move_slowly(&mut run, 300, phase, 6);
        assert_eq!((survived(&actions), warnings(&actions)), (None, vec![]), "{phase}");
    }
    // Not even where a step is long overdue.
    let mut run = at_step_ten();
    assert_eq!(survived(&move_slowly(&mut run, 300, WorkerPhase::Backward, 6)), None);
    let mut run = at_step_ten();
    run.tell(Ask::Pause);
    assert_eq!(survived(&stand_still(&mut run, 120, WorkerPhase::Paused)), None);
}

#[test]
fn a_rank_that_was_named_and_moves_again_is_told_to() {
    let mut run = at_step_ten();
    stand_still(&mut run, 12, WorkerPhase::Checkpoint);
    let actions = move_slowly(&mut run, 2, WorkerPhase::Checkpoint, 6);
    assert_eq!(warnings(&actions), [(1, "moves again")]);
}

#[test]
fn a_rank_that_was_named_alone_is_named_again_when_others_hang_as_it_does() {
    let mut run = at_step_ten();
    run.beat(0, WorkerPhase::Checkpoint);
    run.beat(0, WorkerPhase::Communication);
    let alone = stand_still(&mut run, 10, WorkerPhase::Checkpoint);
    assert!(matches!(warnings(&alone)[..], [(1, text)] if text.contains("declared lost unless")));
    let mut together = Vec::new();
    for _ in 0..120 {
        together.extend(run.wait(Duration::from_secs(1)));
        together.extend((0..2).flat_map(|rank| run.beat(rank, WorkerPhase::Checkpoint)));
    }
    assert_eq!(survived(&together), None, "not what was announced");
    let named = warnings(&together);
    assert!(matches!(named[..], [(1, text)] if text.contains("no rank is declared lost")), "{named:?}");
}

#[test]
fn a_disk_that_holds_up_most_of_the_run_is_nobodys_fault() {
    for (been_there, found_at) in [(false, 62), (true, 9)] {
        let mut run = at_step_ten();
        if been_there {
            run.beat(0, WorkerPhase::Checkpoint);
            run.beat(0, WorkerPhase::Forward);
        }
        let mut named = Vec::new();
        for second in 0..120 {
            let mut actions = run.wait(Duration::from_secs(1));
            actions.extend((0..2).flat_map(|rank| run.beat(rank, WorkerPhase::Checkpoint)));
            assert_eq!(survived(&actions), None);
            named.extend(warnings(&actions).iter().map(|(rank, text)| (second, *rank, (*text).to_owned())));
        }
        assert!(
            matches!(&named[..], [(at, 0, text)] if *at == found_at && text.contains("1 other rank hangs in the same way")),
            "{named:?}"
        );
    }
}

#[test]
fn a_rank_that_is_alone_is_held_against_its_own_earlier_times() {
    for (been_there, found) in [(false, false), (true, true)] {
        let mut run = Run::started(1);
        if been_there {
            run.beat(0, WorkerPhase::Checkpoint);
            run.wait(Duration::from_secs(2));
        }
        run.beat(0, WorkerPhase::Forward);
        let mut actions = Vec::new();
        for _ in 0..40 {
            actions.extend(run.wait(Duration::from_secs(1)));
            if run.machine.run.fleet.roster.living_at(Slot(0)).is_some() {
                actions.extend(run.beat(0, WorkerPhase::Checkpoint));
            }
        }
        assert_eq!(survived(&actions).is_some(), found, "two seconds, three times over, and 27: {actions:?}");
    }
}

#[test]
fn a_rank_that_stands_still_while_it_loads_is_named_and_replaced() {
    let mut run = Run::new(config(2));
    run.gather(2);
    run.beat(0, WorkerPhase::Loading);
    run.beat(1, WorkerPhase::Loading);
    run.wait(Duration::from_secs(2));
    run.beat(1, WorkerPhase::Loading);
    // Rank 0 has loaded in two seconds.
    run.get_ready(0, 0, "");
    let mut actions = Vec::new();
    for second in 0..40 {
        actions.extend(run.wait(Duration::from_secs(1)));
        actions.extend(run.beat(0, WorkerPhase::Joining));
        if run.machine.run.fleet.roster.living_at(Slot(1)).is_some() {
            actions.extend(run.beat(1, WorkerPhase::Loading));
        }
        // Three times three seconds, and seven.
        assert!(second < 15 || warnings(&actions).len() == 1, "{second}: {actions:?}");
    }
    let text = survived(&actions).expect("it is found");
    assert!(text.contains("no progress: load of step 0"), "{text}");
    assert_eq!(respawns(&actions), [(1, 1)]);
}

#[test]
fn a_stuck_network_makes_all_ranks_try_again() {
    let mut run = at_step_ten();
    let actions = stand_still(&mut run, 12, WorkerPhase::Communication);
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    assert_eq!(respawns(&actions), []);
    run.get_ready(0, 1, "");
    let formed = run.get_ready(1, 1, "");
    assert_eq!(survived(&formed).unwrap(), "all ranks wait in collective 3, and none makes progress");
}

#[test]
fn a_network_that_is_lost_while_ranks_are_a_collective_apart_is_no_ranks_fault() {
    let mut run = at_step_ten();
    let mut actions = Vec::new();
    for _ in 0..12 {
        actions.extend(run.wait(Duration::from_secs(1)));
        actions.extend(run.beat_at(0, WorkerPhase::Communication, (3, 2)));
        actions.extend(run.beat_at(1, WorkerPhase::Communication, (4, 3)));
    }
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: false, .. }]), "{actions:?}");
    assert_eq!(respawns(&actions), []);
    run.get_ready(0, 1, "");
    let formed = run.get_ready(1, 1, "");
    assert_eq!(survived(&formed).unwrap(), "all ranks wait in collectives 3 to 4, and none makes progress");
}

#[test]
fn a_rank_that_never_comes_out_of_a_collective_is_replaced_though_the_others_wait_among_writers() {
    let mut run = at_step_ten();
    let (mut actions, mut ready) = (Vec::new(), false);
    for _ in 0..40 {
        actions.extend(run.wait(Duration::from_secs(1)));
        // Rank 0 has written its files and waits for all to have done so; rank 1 never came out of the
        // collective before.
        let aborted = told(&actions, 0).iter().any(|told| matches!(told, Directive::Abort { .. }));
        if aborted && !std::mem::replace(&mut ready, true) {
            actions.extend(run.get_ready(0, 1, ""));
        }
        let phase = if aborted { WorkerPhase::Joining } else { WorkerPhase::Checkpoint };
        actions.extend(run.beat_at(0, phase, (4, 3)));
        if run.machine.run.fleet.roster.living_at(Slot(1)).is_some() {
            actions.extend(run.beat_at(1, WorkerPhase::Communication, (3, 2)));
        }
    }
    assert_eq!(respawns(&actions), [(1, 1)], "{actions:?}");
}

#[test]
fn a_rank_that_stays_in_a_collective_is_replaced_though_the_others_finished_it_and_wait_for_us() {
    let mut run = connecting();
    let (mut actions, mut ready) = (Vec::new(), false);
    for _ in 0..60 {
        actions.extend(run.wait(Duration::from_secs(1)));
        let aborted = told(&actions, 0).iter().any(|told| matches!(told, Directive::Abort { .. }));
        if aborted && !std::mem::replace(&mut ready, true) {
            actions.extend(run.get_ready(0, 1, ""));
        }
        let phase = if aborted { WorkerPhase::Joining } else { WorkerPhase::Paused };
        actions.extend(run.beat_at(0, phase, (2, 2)));
        if run.machine.run.fleet.roster.living_at(Slot(1)).is_some() {
            actions.extend(run.beat_at(1, WorkerPhase::Connecting, (2, 1)));
        }
    }
    assert_eq!(respawns(&actions), [(1, 1)], "{actions:?}");
}

/// Seconds in which rank 0 waits for its neighbours and rank 1 is somewhere else, with collectives entered
/// and finished.
fn wait_for_rank_one(run: &mut Run, seconds: u64, at: (WorkerPhase, (u64, u64))) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..seconds {
        actions.extend(run.wait(Duration::from_secs(1)));
        let waits = match run.machine.run_phase() {
            RunPhase::Starting if at.0 == WorkerPhase::Connecting => WorkerPhase::Connecting,
            _ => WorkerPhase::Communication,
        };
        for (rank, (phase, collective)) in [(0, (waits, (1, 0))), (1, at)] {
            if run.machine.run.fleet.roster.living_at(Slot(rank)).is_some() {
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
    let actions = wait_for_rank_one(&mut run, 10, (WorkerPhase::Connecting, (0, 0)));
    let text = survived(&actions).expect("it is found");
    assert!(text.starts_with("rank 1 on node-a, connect") && text.contains("no activity"), "{text}");
    assert_eq!(respawns(&actions), [(1, 1)]);
    assert_eq!(told(&actions, 0).len(), 1, "and rank 0 gets ready for another generation: {actions:?}");
}

#[test]
fn a_rank_that_stands_still_before_any_step_is_committed_is_named() {
    let mut run = connecting();
    run.start_all(2, 0, StateSource::Fresh);
    let actions = wait_for_rank_one(&mut run, 14, (WorkerPhase::Forward, (0, 0)));
    let text = survived(&actions).expect("it is found");
    assert!(text.contains("no progress: forward of step 0"), "{text}");
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
            if run.machine.run.fleet.roster.living_at(Slot(rank)).is_some() {
                actions.extend(run.beat(rank, phase));
            }
        }
    }
    assert!(survived(&actions).is_some_and(|text| text.contains("no progress: backward")), "{actions:?}");
}

/// Seconds in which both ranks are in a phase, and show no other sign of motion.
fn both(run: &mut Run, seconds: u64, phase: WorkerPhase) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..seconds {
        actions.extend((0..2).flat_map(|rank| run.beat(rank, phase)));
        actions.extend(run.wait(Duration::from_secs(1)));
    }
    actions
}

#[test]
fn a_live_step_may_take_far_longer_than_the_cached_ones_before_it() {
    let mut config = config(2);
    config.cache = super::cache::periodic(2, 8, None);
    let mut run = Run::started_with(config);
    for rank in 0..2 {
        run.steps(rank, 0..8);
    }
    assert_eq!(run.committed(), 8, "two live, six cached, and the next is live");
    assert_eq!(survived(&both(&mut run, 40, WorkerPhase::Forward)), None);
    assert_eq!(survived(&stand_still(&mut run, 40, WorkerPhase::Forward)), None, "rank 0 took so long, too");
}

#[test]
fn a_generation_that_has_only_begun_is_not_held_against_the_one_before() {
    let mut run = at_step_ten();
    run.kill(1);
    run.get_ready(0, 1, "");
    run.replace(1, 1);
    run.start_all(2, 10, StateSource::Replica);
    assert_eq!(survived(&both(&mut run, 40, WorkerPhase::Forward)), None);
}

#[test]
fn what_excuses_a_standstill_does_not_count_once_it_is_over() {
    let mut run = at_step_ten();
    run.tell(Ask::Pause);
    assert_eq!(survived(&both(&mut run, 9, WorkerPhase::Paused)), None);
    run.tell(Ask::Resume);
    assert_eq!(survived(&both(&mut run, 3, WorkerPhase::Forward)), None);
    assert_eq!(survived(&both(&mut run, 22, WorkerPhase::Checkpoint)), None);
    assert_eq!(survived(&both(&mut run, 3, WorkerPhase::Forward)), None);
}

#[test]
fn a_rank_that_stands_still_in_sight_of_a_boundary_that_waits_for_drift_is_named() {
    let mut config = config(2);
    config.cache = super::cache::periodic(20, 30, Some(0.05));
    let mut run = Run::started_with(config);
    for step in 0..40 {
        run.steps(0, step..step + 1);
        run.steps(1, step..step + 1);
    }
    assert_eq!(run.machine.run.progress.waits_for_drift(), Some(Step(53)), "the window ends there");
    let actions = stand_still(&mut run, 10, WorkerPhase::Backward);
    assert!(survived(&actions).is_some_and(|text| text.contains("no progress: backward")), "{actions:?}");
}

#[test]
fn survivors_that_still_compute_when_their_generation_ends_are_waited_for() {
    let mut run = at_step_ten();
    run.kill(1);
    run.replace(1, 1);
    let mut actions = Vec::new();
    for second in 0..30 {
        actions.extend(run.wait(Duration::from_secs(1)));
        let still = Duration::from_secs(second % 6);
        let beat = Beat { still, ..run.moving_beat(0, WorkerPhase::Forward, (2, 2)) };
        actions.extend(run.tell(Ask::Heartbeat(beat)));
        actions.extend(run.beat(1, WorkerPhase::Joining));
    }
    assert_eq!(survived(&actions), None, "a step of half a minute, layer by layer");
}

#[test]
fn a_survivor_that_stays_in_a_collective_of_a_generation_that_has_ended_is_replaced() {
    let mut run = at_step_ten();
    // Rank 0 waits among writers until all have written; rank 1 dies, which should end that wait.
    run.kill(1);
    let mut actions = Vec::new();
    for _ in 0..40 {
        actions.extend(run.wait(Duration::from_secs(1)));
        if run.machine.run.fleet.roster.living_at(Slot(0)).is_some() {
            actions.extend(run.beat_at(0, WorkerPhase::Checkpoint, (4, 3)));
        }
    }
    assert!(respawns(&actions).contains(&(0, 1)), "{actions:?}");
}
