//! What outlives a coordinator, and what it refuses to start from.

use std::{fs, path::Path};

use coxswain_coordinator::{JournalError, Options, ServeError, StartError};
use coxswain_proto::{document, v1};
use tokio::net::TcpListener;

use crate::harness::{Sandbox, options, spec};

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
async fn a_restarted_coordinator_knows_the_run_and_its_ledger() {
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
    assert_eq!((status.committed_steps, status.checkpoints.len()), (4, 1));
    assert_eq!(run(status), before);
    let mut worker = sandbox.worker(0).await;
    assert_ne!(worker.id, id, "ids of another life are not used again");
    assert_eq!(worker.begin().await, 4);
    assert_eq!(worker.generation, 2);
    worker.steps(4..5).await.unwrap();
    let ledger = people.get_ledger(v1::GetLedgerRequest::default()).await.unwrap().into_inner();
    let steps: Vec<_> = ledger.steps.iter().map(|step| (step.step, step.generation)).collect();
    assert_eq!(steps, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]);
}

#[tokio::test]
async fn the_state_directory_of_another_run_is_refused_with_both_names() {
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
    for part in ["monday", "train.global_batch (8 there, 16 here)", "run.output_dir", "remove that directory"]
    {
        assert!(text.contains(part), "{text}");
    }

    let mut other = journaled(directory.path());
    other.run_id = Some("tuesday".into());
    let text = refused(other).await.to_string();
    assert!(text.contains("monday") && text.contains("tuesday"), "{text}");
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

    write_checkpoint(directory.path(), 50, "beef");
    let error = refused(options(spec(directory.path(), 100), 1)).await;
    assert!(error.to_string().contains("train.resume=false"), "{error}");

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
