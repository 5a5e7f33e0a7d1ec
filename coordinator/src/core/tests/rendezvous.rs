//! Workers come: places, refusals, the first generation.

use super::*;
use crate::core::{
    action::{Lease, LeaseCachePhase, Record},
    checkpoints::CheckpointEntry,
    past::PastGeneration,
    refusal::Witness,
};
use coxswain_proto::{ids::LeaseId, report::CheckpointState};

fn node(id: &str, node_rank: Option<u32>) -> Ask {
    Ask::JoinNode(NodeClaim {
        origin: origin(),
        node_id: id.into(),
        host: format!("host-{id}"),
        local_world: 2,
        node_rank,
        returns: false,
    })
}

fn two_nodes() -> Run {
    let mut config = config(2);
    config.world = World::fixed(2, 2);
    Run::new(config)
}

fn placed(node_rank: u32, first_rank: u32) -> Result<Reply, Refusal> {
    Ok(Reply::Placed { node_rank, first: Slot(first_rank) })
}

#[test]
fn nodes_get_places_in_order_of_arrival_and_keep_them() {
    let mut run = two_nodes();
    assert_eq!(run.ask(node("x", None)).0, placed(0, 0));
    assert_eq!(run.ask(node("y", None)).0, placed(1, 2));
    assert_eq!(run.ask(node("x", None)).0, placed(0, 0));
    let refusal = Refusal::NodesComplete { nnodes: 2 };
    let (reply, actions) = run.ask(node("z", None));
    assert_eq!((reply, news(&actions)), (Err(refusal.clone()), vec![&News::Refused(refusal.clone())]));
    let again = run.ask(node("z", None));
    assert_eq!(again, (Err(refusal.clone()), vec![]), "it asks three times a second: told once");
    assert_eq!(run.tell(node("w", None)), [Action::Publish(News::Refused(refusal))], "another one");
}

#[test]
fn a_node_rank_that_the_user_fixed_is_kept_free_of_others() {
    let mut run = two_nodes();
    assert_eq!(run.ask(node("x", Some(0))).0, placed(0, 0));
    let taken = Refusal::NodeRankTaken { node_rank: 0, host: "host-x".into() };
    assert_eq!(run.ask(node("y", Some(0))).0, Err(taken));
    assert_eq!(run.ask(node("y", None)).0, placed(1, 2));
    assert_eq!(run.ask(node("w", Some(2))).0, Err(Refusal::NodeRankOutside { node_rank: 2, nnodes: 2 }));
}

#[test]
fn a_node_of_another_size_is_refused() {
    let mut run = Run::new(config(3));
    assert_eq!(run.ask(node("x", None)).0, Err(Refusal::LocalWorld { theirs: 2, ours: 3 }));
}

#[test]
fn a_generation_is_formed_when_the_last_rank_is_ready() {
    let mut run = Run::new(config(2));
    let (_, first) = run.ask(Ask::Register(claim(0)));
    assert!(first.contains(&Action::Record(Record::DataSet(dataset()))));
    run.tell(Ask::Register(claim(1)));
    drop((run.follow(0, 0), run.follow(1, 1)));
    assert_eq!(run.phase(), RunPhase::WaitingForWorkers);
    assert_eq!(told(&run.get_ready(1, 0, ""), 1), [] as [&Directive; 0]);

    let actions = run.get_ready(0, 0, "");
    let (generation, members) = (Generation(1), vec![(Slot(0), id(0)), (Slot(1), id(1))]);
    assert!(actions.contains(&Action::Record(Record::Generation { generation, members })));
    let told = told(&actions, 0);
    let [Directive::Assignment(assignment, Rank(0))] = told[..] else { panic!("{told:?}") };
    let addresses: Vec<_> = assignment.members.iter().map(|member| member.data_address.as_str()).collect();
    assert_eq!(addresses, ["10.0.0.1:9000", "10.0.0.1:9001"]);
    assert_eq!(run.phase(), RunPhase::Starting);
}

#[test]
fn leases_follow_when_a_rank_says_where_the_generation_starts() {
    let mut run = Run::new(config(2));
    run.gather(2);
    run.get_ready(0, 0, "");
    run.get_ready(1, 0, "");
    let (_, actions) = run.start(1, 0, StateSource::Fresh);
    let (id, generation, first, end) = (LeaseId(1), Generation(1), Step(0), Step(32));
    let cache_phase = LeaseCachePhase::Live { kept: None };
    let lease = Lease { id, generation, first, end, slice: Rank(0), slices: 2, cache_phase };
    assert_eq!(told(&actions, 0), [&Directive::Lease(lease)]);
    let source = StateSource::Fresh;
    assert!(actions.contains(&Action::Record(Record::Started { generation, first_step: first, source })));
    // The other one says the same, and that is no news.
    assert_eq!(run.start(0, 0, StateSource::Fresh), (Ok(Reply::Done), vec![]));
}

#[test]
fn a_worker_is_not_assigned_while_its_line_is_closed() {
    let mut run = Run::new(config(1));
    run.tell(Ask::Register(claim(0)));
    assert_eq!(run.get_ready(0, 0, ""), vec![]);
    let (_, actions) = run.follow(0, 7);
    assert!(matches!(told(&actions, 7)[..], [Directive::Assignment(..)]));
}

#[test]
fn a_worker_that_opens_its_line_again_is_told_what_it_missed() {
    let mut run = Run::started(1);
    let (_, actions) = run.follow(0, 7);
    assert!(matches!(
        told(&actions, 7)[..],
        [Directive::Assignment(..), Directive::Lease(_), Directive::Resume]
    ));
}

#[test]
fn training_starts_at_the_newest_checkpoint_and_in_a_new_generation() {
    let mut config = config(1);
    let over = PastGeneration { over: true, ..PastGeneration::default() };
    config.past.generations.insert(Generation(4), over);
    config.past.committed = Some(Step(40));
    config.checkpoints = vec![CheckpointEntry {
        step: Step(40),
        path: String::new(),
        bytes: Bytes(0),
        state: CheckpointState::Complete,
    }];
    let mut run = Run::started_with(config);
    let (_, actions) = run.follow(0, 7);
    let [Directive::Assignment(assignment, _), Directive::Lease(lease), Directive::Resume] =
        told(&actions, 7)[..]
    else {
        panic!()
    };
    assert_eq!((assignment.generation, assignment.checkpoint), (Generation(5), Step(40)));
    assert_eq!((lease.first, lease.end), (Step(40), Step(72)));
}

#[test]
fn a_run_whose_steps_are_all_done_goes_straight_to_its_end() {
    let mut config = config(1);
    config.past.committed = Some(Step(100));
    let mut run = Run::started_with(config);
    assert_eq!(run.phase(), RunPhase::Stopping);
    run.tell(Ask::Leave { worker: id(0), exit_code: 0, reason: "done".into() });
    assert_eq!(run.phase(), RunPhase::Finished);
}

#[test]
fn registering_twice_is_registering_once() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));
    let (reply, actions) = run.ask(Ask::Register(claim(0)));
    assert_eq!(reply, Ok(Reply::Registered(id(0))));
    assert_eq!(actions, vec![]);
}

#[test]
fn two_processes_cannot_claim_one_rank() {
    let mut run = Run::new(config(2));
    for line in [false, true] {
        run.tell(Ask::Register(claim(0)));
        if line {
            drop(run.follow(0, 0));
        }
        let refusal = Refusal::RankTaken { slot: Slot(0), host: "node-a".into(), pid: 100 };
        let (reply, actions) = run.ask(Ask::Register(successor(0, 1 + u32::from(line))));
        assert_eq!(reply, Err(refusal.clone()));
        assert_eq!(news(&actions), [&News::Refused(refusal)]);
    }
}

#[test]
fn another_version_run_rank_or_data_set_is_refused() {
    let mut run = Run::new(config(2));
    run.tell(Ask::Register(claim(0)));

    let mut stranger = claim(1);
    stranger.origin.version = "9.9.9".into();
    let refusal = run.ask(Ask::Register(stranger)).0.unwrap_err();
    assert_eq!(refusal, Refusal::Version { theirs: "9.9.9".into(), ours: VERSION.into() });

    let mut stranger = claim(1);
    stranger.origin.run_id = "row-2".into();
    let refusal = run.ask(Ask::Register(stranger)).0.unwrap_err();
    assert_eq!(refusal, Refusal::OtherRun { theirs: "row-2".into(), ours: RUN.into() });

    let refusal = run.ask(Ask::Register(claim(2))).0.unwrap_err();
    assert_eq!(refusal, Refusal::RankOutside { slot: Slot(2), world: 2 });

    let mut stranger = claim(1);
    stranger.dataset.training_samples = 31;
    let refusal = run.ask(Ask::Register(stranger)).0.unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "rank 1 sees 31 training samples with fingerprint f00d, but rank 0 on node-a sees 30 training samples with \
         fingerprint f00d: data.path must hold the same data set on every node"
    );
    assert_eq!(run.phase(), RunPhase::WaitingForWorkers);
}

#[test]
fn a_continued_run_keeps_its_data_set() {
    let mut config = config(1);
    let earlier =
        DataSet { training_samples: 30, fingerprint: "beef".into(), order_key: 5, sets: Vec::new() };
    config.past.dataset = Some(earlier.clone());
    let mut run = Run::new(config);
    let (slot, theirs) = (Slot(0), dataset());
    let refusal = Refusal::OtherDataSet {
        slot,
        theirs: theirs.into(),
        witness: Witness::Journal,
        ours: earlier.into(),
    };
    assert_eq!(run.ask(Ask::Register(claim(0))).0, Err(refusal));
}

#[test]
fn an_empty_data_set_is_refused() {
    let mut run = Run::new(config(1));
    let mut empty = claim(0);
    empty.dataset.training_samples = 0;
    let refusal = run.ask(Ask::Register(empty)).0.unwrap_err();
    assert_eq!(refusal, Refusal::Plan(coxswain_proto::plan::PlanError::NoSamples));
}

#[test]
fn a_world_that_stays_incomplete_fails_with_the_missing_ranks() {
    let mut run = Run::new(config(3));
    run.gather(1);
    for _ in 0..29 {
        run.wait(Duration::from_secs(2));
        run.beat(0, WorkerPhase::Loading);
    }
    let actions = run.wait(Duration::from_secs(2));
    assert!(matches!(told(&actions, 0)[..], [Directive::Abort { over: true, .. }]));
    let [News::Failure(failure, _)] = &news(&actions)[..1] else { panic!("{actions:?}") };
    assert_eq!(failure.message, "only 1 of 3 workers joined within 60 s; missing ranks: 1, 2");
    assert_eq!(run.phase(), RunPhase::Failed);
}

#[test]
fn a_line_opened_twice_closes_the_older_one_and_replays() {
    let mut run = Run::started(1);
    run.steps(0, 0..5);
    run.tell(Ask::Pause);
    run.tell(Ask::CheckpointNow);
    let (_, actions) = run.follow(0, 9);
    assert_eq!(actions[0], Action::Close(StreamId(0)));
    let told = told(&actions, 9);
    let [Directive::Assignment(..), Directive::Lease(lease), Directive::Pause, Directive::Checkpoint(1)] =
        told[..]
    else {
        panic!("{told:?}")
    };
    assert_eq!((lease.first, lease.end), (Step(5), Step(32)));
    // The old line's end is old news.
    assert_eq!(run.event(Event::LineClosed(id(0), StreamId(0))), vec![]);
}
