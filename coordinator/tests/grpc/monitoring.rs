//! What monitoring systems read: `/metrics` beside the gRPC services, scalars for TensorBoard on disk.

use std::{fs, time::Duration};

use coxswain_proto::{
    report::{Merge, Metric},
    v1,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::{Sandbox, Scope, guarded, options, spec};

/// What `curl` would show: the status line, headers and body of a plain HTTP/1.1 request.
async fn get(sandbox: &Sandbox, path: &str, header: &str) -> String {
    let address = sandbox.endpoint.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{header}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn metrics_tell_where_the_run_is_on_the_same_port() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 4), 2)).await;
    let before = get(&sandbox, "/metrics", "").await;
    assert!(before.contains("application/openmetrics-text"), "{before}");
    assert!(before.contains("\ncoxswain_steps_committed 0"), "{before}");
    assert!(before.contains("phase=\"waiting for workers\""), "{before}");
    assert!(!before.contains("\ncoxswain_loss "), "nothing is known of a loss yet: {before}");

    let mut fake_workers = sandbox.fake_workers(2).await;
    for worker in &mut fake_workers {
        let time = |ms| Metric::stage_time("language", Duration::from_millis(ms));
        let sum = Metric { unit: "bytes".into(), merge: Merge::Sum, ..Metric::same("made_up/thing", 16.0) };
        worker.metrics = vec![time(2 + 4 * u64::from(worker.rank)), sum, Metric::same("alone", 0.5)];
        worker.begin().await;
        worker.steps(0..3).await.unwrap();
    }
    let during = get(&sandbox, "/metrics", "").await;
    for line in [
        "coxswain_steps_committed 3",
        "coxswain_steps_planned 4",
        "coxswain_world_size 2",
        "coxswain_workers 2",
        "coxswain_restarts_total 0",
        "coxswain_loss ",
        "coxswain_step_part_time_seconds{part=\"language\"} 0.004",
        "coxswain_metric_made_up_bytes{of=\"thing\"} 32.0",
        "coxswain_metric_alone{of=\"\"} 0.5",
        "coxswain_rank_memory_peak_bytes{rank=\"1\",host=\"node-a\",device=",
    ] {
        assert!(during.contains(&format!("\n{line}")), "{line} is not in {during}");
    }
    assert!(during.contains("# EOF"), "{during}");

    let plain = get(&sandbox, "/metrics", "Accept: text/plain;q=0.5\r\n").await;
    for line in [
        "# TYPE coxswain_restarts_total counter",
        "coxswain_restarts_total 0",
        "# TYPE coxswain_workers gauge",
    ] {
        assert!(plain.contains(&format!("\n{line}\n")), "{line} is not in {plain}");
    }
    assert!(plain.contains("text/plain; version=0.0.4") && !plain.contains("# EOF"), "{plain}");
    let of_prometheus =
        "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3\r\n";
    let open = get(&sandbox, "/metrics", of_prometheus).await;
    assert!(open.contains("application/openmetrics-text") && open.contains("# EOF"), "{open}");
    let unknown = get(&sandbox, "/healthz", "").await;
    assert!(unknown.starts_with("HTTP/1.1 404") && unknown.contains("/metrics"), "{unknown}");
    let method = get(&sandbox, "/coxswain.v1.Control/None", "Content-Type: application/grpc\r\n").await;
    assert!(method.to_lowercase().contains("grpc-status: 12"), "{method}");
    drop(fake_workers);
    sandbox.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_slow_rank_is_named_until_it_keeps_up() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 60), 2)).await;
    let mut fake_workers = sandbox.fake_workers(2).await;
    for worker in &mut fake_workers {
        worker.begin().await;
    }
    for (steps, step_ms, slow) in [(0..16, 10.0, false), (16..32, 20.0, true), (32..48, 10.0, false)] {
        fake_workers[1].step_ms = step_ms;
        for worker in &mut fake_workers {
            worker.steps(steps.clone()).await.unwrap();
        }
        let metrics = get(&sandbox, "/metrics", "").await;
        let named = metrics.contains("\ncoxswain_rank_slowness{rank=\"1\",host=\"node-a\",device=");
        assert_eq!(named, slow, "{metrics}");
        assert!(!metrics.contains("coxswain_rank_slowness{rank=\"0\""), "{metrics}");
        let request = v1::GetStatusRequest {};
        let status = sandbox.people().await.get_status(request).await.unwrap().into_inner();
        let told = status.ranks[1].slow.as_ref().map(|slow| (slow.part.as_str(), slow.factor));
        assert_eq!(told, slow.then_some(("compute", 2.0)));
    }
    drop(fake_workers);
    sandbox.shut_down().await.unwrap();
}

#[tokio::test]
async fn metrics_want_the_token_that_calls_want() {
    let directory = tempfile::tempdir().unwrap();
    let (options, credentials) =
        guarded(options(spec(directory.path(), 4), 1), &[Scope::Read, Scope::Worker]);
    let token = credentials[0].tokens().and_then(|tokens| tokens.for_scope(Scope::Read)).unwrap();
    let sandbox = Sandbox::start(options).await;
    let refused = get(&sandbox, "/metrics", "").await;
    assert!(refused.starts_with("HTTP/1.1 401") && refused.contains("COX_TOKEN"), "{refused}");
    let refused = get(&sandbox, "/metrics", "Authorization: Bearer other\r\n").await;
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    let answered = get(&sandbox, "/metrics", &format!("Authorization: Bearer {}\r\n", token.secret())).await;
    assert!(answered.starts_with("HTTP/1.1 200") && answered.contains("coxswain_"), "{answered}");
    sandbox.shut_down().await.unwrap();
}

#[tokio::test]
async fn scalars_of_every_committed_step_are_on_disk_when_the_run_is_over() {
    let directory = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 3), 1)).await;
    let mut fake_workers = sandbox.fake_workers(1).await;
    fake_workers[0].metrics = vec![
        Metric::stage_time("tower", Duration::from_millis(2)),
        Metric::same("made_up/thing", 0.5),
        Metric::learning_rate("slow", 1e-5),
    ];
    fake_workers[0].begin().await;
    fake_workers[0].steps(0..3).await.unwrap();
    fake_workers[0].leave(0).await;
    sandbox.outcome().await.unwrap();
    let written = directory.path().join("out/tensorboard");
    let files: Vec<_> = fs::read_dir(&written).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one file a life: {files:?}") };
    let bytes = fs::read(file).unwrap();
    let count = |needle: &[u8]| bytes.windows(needle.len()).filter(|window| *window == needle).count();
    assert_eq!((count(b"brain.Event:2"), count(b"train/loss")), (1, 3));
    let metrics = ["seconds/tower", "made_up/thing", "lr/slow", "train/learning_rate"];
    assert_eq!(metrics.map(|name| count(name.as_bytes())), [3; 4]);
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_costs_scalars_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir_all(directory.path().join("out")).unwrap();
    fs::write(directory.path().join("out/tensorboard"), "in the way").unwrap();
    let sandbox = Sandbox::start(options(spec(directory.path(), 2), 1)).await;
    let mut fake_workers = sandbox.fake_workers(1).await;
    fake_workers[0].begin().await;
    fake_workers[0].steps(0..2).await.unwrap();
    fake_workers[0].leave(0).await;
    sandbox.outcome().await.unwrap();
}
