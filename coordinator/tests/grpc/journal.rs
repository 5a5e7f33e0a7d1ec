//! What outlives a coordinator, and what it refuses to start from.

use std::{fs, path::Path};

use coxswain_coordinator::{
    JournalError, Opening, Options, ServeError, StartError,
    journal::{self, Chronicle},
};
use coxswain_proto::{
    document,
    v1::{self, get_history_response::Kind},
};
use tokio::net::TcpListener;

use crate::harness::{FakeWorker, Sandbox, options, register, spec, successor};

fn journaled(directory: &Path) -> Options {
    let mut options = options(spec(directory, 100), 1);
    options.state_dir = Some(directory.join("state"));
    options
}

async fn refused(options: Options) -> ServeError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let serving = coxswain_coordinator::serve(listener, options, std::future::pending());
    serving.await.expect_err("it must not serve")
}

fn write_checkpoint(directory: &Path, step: u64, digest: &str) {
    let path = directory.join(format!("out/checkpoints/step-{step:08}"));
    fs::create_dir_all(&path).unwrap();
    let manifest = serde_json::json!({
        "format": 1, "step": step, "epoch": 0, "world_size": 1, "spec_digest": digest,
        "files": {"trainables.safetensors": {"bytes": 10, "blake3": "00"}},
    });
    fs::write(path.join("manifest.json"), manifest.to_string()).unwrap();
}

#[tokio::test]
async fn a_killed_coordinator_is_replaced_without_a_worker_noticing_more_than_a_lost_line() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    sandbox.kill().await;

    let sandbox = successor(|| journaled(directory.path())).await;
    let mut people = sandbox.people().await;
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.committed_steps, status.generation, status.restarts), (6, 1, 0));
    worker.follow_again(&sandbox.endpoint).await.unwrap();
    worker.assigned().await;
    assert_eq!(worker.generation, 1);
    assert_eq!(worker.steps(6..10).await.unwrap(), 10);
    assert!(worker.beat(v1::WorkerPhase::Forward).await);
    let ledger = people.get_ledger(v1::GetLedgerRequest::default()).await.unwrap().into_inner();
    let steps: Vec<_> = ledger.steps.iter().map(|step| (step.step, step.generation)).collect();
    assert_eq!(steps, (0..10).map(|step| (step, 1)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_run_that_is_begun_again_goes_on_from_its_checkpoint_and_says_what_is_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    let run = |status: v1::GetStatusResponse| status.run_id;
    let status = sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    let (before, id) = (run(status), worker.id);
    sandbox.shut_down().await.unwrap();

    write_checkpoint(directory.path(), 4, &document::digest(&spec(directory.path(), 100)));
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut people = sandbox.people().await;
    let status = people.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.committed_steps, status.checkpoints.len()), (6, 1));
    assert_eq!(run(status), before);
    // Another process than the one that the journal knows.
    let mut claim = register(0);
    claim.incarnation = "another life".into();
    let mut worker = FakeWorker::join(sandbox.workers().await, sandbox.plan, claim).await.unwrap();
    assert_ne!(worker.id, id, "ids of another life are not used again");
    assert_eq!(worker.begin().await, 4);
    assert_eq!(worker.generation, 2);
    worker.steps(4..5).await.unwrap();
    let ledger = people.get_ledger(v1::GetLedgerRequest::default()).await.unwrap().into_inner();
    let steps: Vec<_> = ledger.steps.iter().map(|step| (step.step, step.generation)).collect();
    assert_eq!(steps, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]);
}

/// The records, once nobody holds them any more.
async fn left_behind(state: &Path) -> Chronicle {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        match journal::read(state) {
            Ok(records) => return records,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
        tokio::task::yield_now().await;
    }
}

/// What a coordinator tells of its journal beside the ledger.
async fn told(sandbox: &Sandbox) -> Vec<Kind> {
    let mut entries =
        sandbox.people().await.get_history(v1::GetHistoryRequest {}).await.unwrap().into_inner();
    let mut told = Vec::new();
    while let Some(entry) = entries.message().await.unwrap() {
        told.push(entry.kind.unwrap());
    }
    told
}

#[tokio::test]
async fn a_coordinator_tells_where_its_generations_had_their_state_from_as_the_journal_does() {
    for keeps in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let mut options = journaled(directory.path());
        options.state_dir = options.state_dir.filter(|_| keeps);
        let sandbox = Sandbox::start(options).await;
        let mut worker = sandbox.worker(0).await;
        worker.begin().await;
        worker.steps(0..6).await.unwrap();
        worker.ready(1, "its neighbour is gone").await.unwrap();
        while !matches!(worker.told().await, v1::directive::Kind::Assignment(next) if next.generation == 2) {}
        worker.generation = 2;
        worker.starts(6, v1::StateSource::Carried).await;
        worker.steps(6..7).await.unwrap();
        let told = told(&sandbox).await;
        let started = |generation, first_step, source: v1::StateSource| {
            let started = v1::MembershipStart { first_step, source: source.into() };
            Kind::Membership(v1::MembershipRecord { generation, workers: 1, started: Some(started) })
        };
        assert_eq!(
            told[..3],
            [
                Kind::End(v1::RunEnd::NotOver.into()),
                started(1, 0, v1::StateSource::Checkpoint),
                started(2, 6, v1::StateSource::Carried)
            ]
        );
        assert!(matches!(&told[3..], [Kind::Fault(fault)] if fault.message == "its neighbour is gone"));
        sandbox.kill().await;
        if keeps {
            let history = left_behind(&directory.path().join("state")).await.history;
            let memberships: Vec<_> =
                history.memberships.iter().map(|of| Kind::Membership(of.into())).collect();
            assert_eq!(told[1..3], memberships);
            assert_eq!(told[3..], [Kind::Fault(history.failures.last().unwrap().into())]);
        }
    }
}

#[tokio::test]
async fn the_journal_can_be_read_without_a_coordinator() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    assert!(journal::read(&state).is_err(), "there is none yet");
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    assert!(matches!(journal::read(&state), Err(JournalError::InUse { .. })));
    sandbox.kill().await;
    let records = left_behind(&state).await;
    assert_eq!((records.training_samples, records.global_batch, records.total_steps), (30, 8, Some(100)));
    let positions: Vec<_> = records.steps.iter().map(|step| step.positions.clone()).collect();
    assert_eq!(positions, [0..8, 8..16, 16..24, 24..30, 0..8, 8..16]);
    assert_eq!((records.history.memberships.len(), records.history.fate), (1, journal::Fate::NotOver));
    assert_eq!(journal::read(&state).unwrap(), records, "it is left as it was");
}

#[tokio::test]
async fn a_damaged_row_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    sandbox.shut_down().await.unwrap();
    const STEPS: redb::TableDefinition<u64, &str> = redb::TableDefinition::new("steps");
    let path = directory.path().join("state/journal.redb");
    let damage = |change: &dyn Fn(&mut redb::Table<u64, &str>)| {
        let database = redb::Database::create(&path).unwrap();
        let write = database.begin_write().unwrap();
        change(&mut write.open_table(STEPS).unwrap());
        write.commit().unwrap();
    };
    damage(&|steps| drop(steps.insert(3, "{\"step\": 3, \"ep").unwrap()));
    let text = refused(journaled(directory.path())).await.to_string();
    assert!(text.contains("row 3 of table steps"), "{text}");
    damage(&|steps| drop(steps.remove(3).unwrap()));
    let text = refused(journaled(directory.path())).await.to_string();
    assert!(text.contains("row 4 of table steps") && text.contains("rows are missing"), "{text}");
}

#[tokio::test]
async fn flipped_bytes_never_bring_a_coordinator_down() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..20).await.unwrap();
    sandbox.shut_down().await.unwrap();
    let path = directory.path().join("state/journal.redb");
    let whole = fs::read(&path).unwrap();
    let records = journal::read(&directory.path().join("state")).unwrap();
    let mut refusals = 0;
    for place in (0..whole.len()).step_by(whole.len() / 48) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x5a;
        fs::write(&path, &bytes).unwrap();
        match journal::read(&directory.path().join("state")) {
            Ok(found) => {
                assert_eq!(found, records, "byte {place} changed what was written, and nobody noticed")
            }
            Err(error) => {
                assert!(error.to_string().contains("journal in"), "{error}");
                refusals += 1;
            }
        }
    }
    for length in [whole.len() / 2, whole.len() - 4096, 17] {
        fs::write(&path, &whole[..length]).unwrap();
        // Whatever comes of it is an answer.
        drop(journal::read(&directory.path().join("state")));
    }
    assert!(refusals > 0);
}

#[tokio::test]
async fn a_run_that_begins_anew_forgets_its_ledger_unless_its_coordinator_was_only_lost() {
    let directory = tempfile::tempdir().unwrap();
    let anew = || {
        let mut options = journaled(directory.path());
        options.spec.train.resume = false;
        options
    };
    let sandbox = Sandbox::start(anew()).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    sandbox.kill().await;
    let sandbox = successor(anew).await;
    let committed = |status: v1::GetStatusResponse| status.committed_steps;
    let status = sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap();
    assert_eq!(committed(status.into_inner()), 6);
    sandbox.shut_down().await.unwrap();
    let sandbox = Sandbox::start(anew()).await;
    let status = sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap();
    assert_eq!(committed(status.into_inner()), 0);
}

#[tokio::test]
async fn the_state_directory_of_another_run_is_refused_with_what_differs() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = journaled(directory.path());
    first.run_id = Some("monday".into());
    Sandbox::start(first).await.shut_down_when_ready().await;

    let mut other = journaled(directory.path());
    other.spec.train.global_batch = 16;
    other.run_id = Some("monday".into());
    let error = refused(other).await;
    assert!(
        matches!(&error, ServeError::Start(StartError::Journal(JournalError::OtherRun { .. }))),
        "{error:?}"
    );
    let text = error.to_string();
    let parts = [
        "the journal of this run with another configuration",
        "train.global_batch (8 there, 16 here)",
        "run.output_dir",
        "remove the journal's directory",
    ];
    for part in parts {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn the_next_job_of_a_scheduler_goes_on_under_its_own_run_id() {
    let directory = tempfile::tempdir().unwrap();
    let job = |id: &str| {
        let mut options = journaled(directory.path());
        options.run_id = Some(id.into());
        options
    };
    let sandbox = Sandbox::start(job("4711")).await;
    let mut worker = sandbox.worker(0).await;
    worker.begin().await;
    worker.steps(0..6).await.unwrap();
    sandbox.shut_down().await.unwrap();

    let sandbox = Sandbox::start(job("4712")).await;
    let status = sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.committed_steps, status.run_id.as_str()), (6, "4712"));
    sandbox.shut_down().await.unwrap();

    let sandbox = Sandbox::start(journaled(directory.path())).await;
    let status = sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.run_id, "4712", "who names none goes on under the last one");
}

#[tokio::test]
async fn a_run_may_be_prolonged_in_its_own_directory() {
    let directory = tempfile::tempdir().unwrap();
    Sandbox::start(journaled(directory.path())).await.shut_down_when_ready().await;
    let mut longer = journaled(directory.path());
    longer.spec.train.steps = Some(200);
    Sandbox::start(longer).await.shut_down_when_ready().await;
}

#[tokio::test]
async fn one_state_directory_serves_one_coordinator() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(journaled(directory.path())).await;
    sandbox.people().await.get_status(v1::GetStatusRequest {}).await.unwrap();
    let error = refused(journaled(directory.path())).await;
    assert!(
        matches!(&error, ServeError::Start(StartError::Journal(JournalError::InUse { .. }))),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_garbled_journal_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir_all(directory.path().join("state")).unwrap();
    fs::write(directory.path().join("state/journal.redb"), "not a database").unwrap();
    let error = refused(journaled(directory.path())).await;
    assert!(error.to_string().starts_with("cannot open the journal in "), "{error}");
}

#[tokio::test]
async fn a_run_goes_on_without_a_journal_that_cannot_be_read_when_asked_to_and_its_new_one_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let (spec, state) = (spec(directory.path(), 100), directory.path().join("out/coordinator"));
    let launched = || Options { state_dir: Some(state.clone()), ..options(spec.clone(), 1) };
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("journal.redb"), "not a database").unwrap();
    let refused = |new_journal| Opening::read(&spec, new_journal).unwrap_err().to_string();
    let told = refused(false);
    assert!(told.contains("is damaged") && told.contains("to start over with a new"), "{told}");
    write_checkpoint(directory.path(), 30, &document::digest(&spec));
    let told = refused(false);
    assert!(told.contains("Launch with --new-journal to continue from checkpoints/step-00000030"), "{told}");
    assert_eq!(fs::read(state.join("journal.redb")).unwrap(), b"not a database", "nothing is changed");

    let kept = Opening::read(&spec, true).unwrap().set_journal_aside().unwrap().unwrap();
    assert_eq!(fs::read(kept).unwrap(), b"not a database");
    let sandbox = Sandbox::start(launched()).await;
    assert_eq!(sandbox.worker(0).await.begin().await, 30);
    sandbox.shut_down().await.unwrap();
    let told = refused(true);
    assert!(told.contains("start again without --new-journal"), "{told}");
    let message = |records: &Chronicle| {
        let changes = &records.history.changes;
        changes.iter().map(|change| (change.step.0, change.key.clone())).collect::<Vec<_>>()
    };
    let changes = message(&journal::read(&state).unwrap());
    assert_eq!(changes, [(30, "coordinator/journal.redb".to_owned())]);

    // One that is gone says so, too; and one that is there says no more.
    Sandbox::start(launched()).await.shut_down_when_ready().await;
    assert_eq!(message(&journal::read(&state).unwrap()), changes);
    fs::remove_file(state.join("journal.redb")).unwrap();
    Sandbox::start(launched()).await.shut_down_when_ready().await;
    assert_eq!(message(&journal::read(&state).unwrap()), changes);
}

#[tokio::test]
async fn only_readable_checkpoints_of_this_run_count() {
    let directory = tempfile::tempdir().unwrap();
    let own = document::digest(&spec(directory.path(), 100));
    write_checkpoint(directory.path(), 20, &own);
    write_checkpoint(directory.path(), 30, &own);
    let torn = directory.path().join("out/checkpoints/step-00000040");
    fs::create_dir_all(&torn).unwrap();
    fs::write(torn.join("manifest.json"), "{\"format\": 1, \"st").unwrap();
    fs::create_dir_all(directory.path().join("out/checkpoints/.tmp-50")).unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 100), 1)).await;
    assert_eq!(sandbox.worker(0).await.begin().await, 30);
    sandbox.shut_down().await.unwrap();

    let shorter = spec(directory.path(), 20);
    write_checkpoint(directory.path(), 30, &document::digest(&shorter));
    let error = refused(options(shorter, 1)).await;
    assert!(error.to_string().contains("train.steps is 20"), "{error}");

    write_checkpoint(directory.path(), 50, "beef");
    let error = refused(options(spec(directory.path(), 100), 1)).await;
    assert!(error.to_string().contains("train.resume=false"), "{error}");

    let later = directory.path().join("out/checkpoints/step-00000050/manifest.json");
    fs::write(&later, "{\"format\": 2}").unwrap();
    let error = refused(options(spec(directory.path(), 100), 1)).await;
    assert!(error.to_string().contains("step-00000050: format 2 is unknown"), "{error}");

    let mut anew = spec(directory.path(), 100);
    anew.train.resume = false;
    let sandbox = Sandbox::start(options(anew, 1)).await;
    assert_eq!(sandbox.worker(0).await.begin().await, 0);
}

#[tokio::test]
async fn the_run_directory_says_whose_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(spec(directory.path(), 100), 1);
    options.run_id = Some("monday".into());
    Sandbox::start(options).await.shut_down_when_ready().await;
    let text = fs::read_to_string(directory.path().join("out/run.json")).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["run_id"], "monday");
    assert_eq!(file["spec_digest"], document::digest(&spec(directory.path(), 100)));
}
