//! A coordinator on port 0, and fake workers that speak the protocol.

use std::{path::Path, time::Duration};

use coxswain_coordinator::{Budgets, Options, Outcome, Patience, ServeError, World};
pub use coxswain_identity::Scope;
use coxswain_identity::{CertificateFiles, Credentials, Door, Token, Tokens};
use coxswain_proto::{
    VERSION,
    ids::{Rank, Step},
    plan::Plan,
    report::Metric,
    run_spec::RunSpec,
    v1::{self, control_client::ControlClient, coordinator_client::CoordinatorClient, directive::Kind},
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use tonic::{Status, Streaming, transport::Channel};

pub const SAMPLES: u64 = 30;
/// A test that waits longer than this is broken.
pub const TEST_LIMIT: Duration = Duration::from_secs(30);

/// A run of `steps` steps that writes below `directory`.
pub fn spec(directory: &Path, steps: u64) -> RunSpec {
    serde_json::from_value(serde_json::json!({
        "run": {"name": "quick", "output_dir": directory.join("out"), "seed": 7},
        "model": {"path": "models/tiny"},
        "data": {"path": "data/tiny", "cameras": ["front"]},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 2},
    }))
    .expect("the specification is complete")
}

/// Options without a journal for `world` workers on one node.
pub fn options(spec: RunSpec, world: u32) -> Options {
    Options::new(spec, World::fixed(1, world))
}

/// These options behind a door with a token of each scope, and callers that have one each.
pub fn guarded(options: Options, scopes: &[Scope]) -> (Options, Vec<Credentials>) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("tokens");
    let tokens: Vec<_> = scopes.iter().map(|scope| Token::fresh(*scope).expect("randomness")).collect();
    tokens.iter().for_each(|token| Tokens::add_to_file(&file, token).expect("a file"));
    let credentials = |tokens| Credentials::new(Some(tokens), CertificateFiles::default());
    let door = Door::new(&credentials(Tokens::of_file(&file).expect("tokens")), false).expect("a door");
    (Options { door, ..options }, tokens.into_iter().map(|token| credentials(Tokens::one(token))).collect())
}

/// A coordinator in this process.
pub struct Sandbox {
    pub endpoint: String,
    pub plan: Plan,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<Result<Outcome, ServeError>>,
}

impl Sandbox {
    pub async fn start(options: Options) -> Self {
        Self::start_at("127.0.0.1:0", options).await
    }

    /// A coordinator at an address that was another's a moment ago.
    pub async fn start_at(address: &str, options: Options) -> Self {
        let deadline = tokio::time::Instant::now() + TEST_LIMIT;
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) => assert!(tokio::time::Instant::now() < deadline, "{address}: {error}"),
            }
            tokio::task::yield_now().await;
        };
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let plan = Plan::new(&options.spec.train, SAMPLES).expect("the plan is possible");
        let (shutdown, down) = oneshot::channel::<()>();
        let task = tokio::spawn(coxswain_coordinator::serve(listener, options, async move {
            let _ = down.await;
        }));
        Self { endpoint, plan, shutdown, task }
    }

    /// Waits until it answers; false if it has ended instead.
    pub async fn serves(&mut self) -> bool {
        let channel = Channel::from_shared(self.endpoint.clone()).expect("a valid address").connect_lazy();
        let mut people = ControlClient::new(channel);
        tokio::select! {
            _ = &mut self.task => false,
            status = people.get_status(v1::GetStatusRequest {}) => status.is_ok(),
        }
    }

    pub async fn channel(&self) -> Channel {
        let endpoint = Channel::from_shared(self.endpoint.clone()).expect("a valid address");
        endpoint.connect().await.expect("the coordinator listens")
    }

    pub async fn workers(&self) -> CoordinatorClient<Channel> {
        CoordinatorClient::new(self.channel().await)
    }

    pub async fn people(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel().await)
    }

    pub async fn worker(&self, rank: u32) -> FakeWorker {
        FakeWorker::join(self.workers().await, self.plan, register(rank)).await.expect("the rank is free")
    }

    /// A complete world.
    pub async fn fake_workers(&self, world: u32) -> Vec<FakeWorker> {
        let mut fake_workers = Vec::new();
        for rank in 0..world {
            fake_workers.push(self.worker(rank).await);
        }
        fake_workers
    }

    /// How the run ended by itself.
    pub async fn outcome(self) -> Result<Outcome, ServeError> {
        let ended = tokio::time::timeout(TEST_LIMIT, self.task).await;
        ended.expect("the coordinator ends").expect("it does not panic")
    }

    /// Shuts the coordinator down once it has answered.
    pub async fn shut_down_when_ready(self) {
        self.people().await.get_status(v1::GetStatusRequest {}).await.expect("it serves");
        self.shut_down().await.expect("it ends in order");
    }

    /// Kills the coordinator: nothing of it says good-bye.
    pub async fn kill(self) {
        self.task.abort();
        let ended = tokio::time::timeout(TEST_LIMIT, self.task).await.expect("the coordinator ends");
        assert!(ended.expect_err("it did not end by itself").is_cancelled());
    }

    /// Shuts the coordinator down.
    pub async fn shut_down(self) -> Result<Outcome, ServeError> {
        self.shutdown.send(()).expect("it still serves");
        let ended = tokio::time::timeout(TEST_LIMIT, self.task).await;
        ended.expect("the coordinator ends").expect("it does not panic")
    }
}

/// What a worker of this version says when it registers.
pub fn register(rank: u32) -> v1::RegisterRequest {
    v1::RegisterRequest {
        version: VERSION.into(),
        incarnation: format!("life-{rank}"),
        host: "node-a".into(),
        pid: 100 + rank,
        rank,
        local_rank: rank,
        data_address: format!("127.0.0.1:{}", 9000 + rank),
        device: "cpu".into(),
        training_samples: SAMPLES,
        dataset_fingerprint: "f00d".into(),
        ..Default::default()
    }
}

/// A worker that reports whatever it is told to.
pub struct FakeWorker {
    pub client: CoordinatorClient<Channel>,
    pub id: u64,
    pub rank: u32,
    pub incarnation: String,
    pub generation: u64,
    pub world: u32,
    pub directives: Streaming<v1::Directive>,
    /// What its reports say of the feature cache.
    pub cache_generation: u64,
    /// What its reports say besides.
    pub metrics: Vec<Metric>,
    /// Milliseconds that each of its steps takes.
    pub step_ms: f64,
    plan: Plan,
}

impl FakeWorker {
    pub async fn join(
        mut client: CoordinatorClient<Channel>,
        plan: Plan,
        request: v1::RegisterRequest,
    ) -> Result<Self, Status> {
        let (rank, incarnation) = (request.rank, request.incarnation.clone());
        let id = client.register(request).await?.into_inner().worker_id;
        let follow = v1::FollowRequest { worker_id: id, incarnation: incarnation.clone() };
        let directives = client.follow(follow).await?.into_inner();
        let mut worker = Self {
            client,
            id,
            rank,
            incarnation,
            generation: 0,
            world: 0,
            directives,
            plan,
            cache_generation: 0,
            metrics: Vec::new(),
            step_ms: 10.0,
        };
        worker.ready(0, "").await?;
        Ok(worker)
    }

    /// Says that it can take a place in the next generation.
    pub async fn ready(&mut self, left_generation: u64, reason: &str) -> Result<(), Status> {
        let (incarnation, reason) = (self.incarnation.clone(), reason.to_owned());
        let request = v1::ReadyRequest { worker_id: self.id, incarnation, left_generation, reason };
        self.client.ready(request).await.map(drop)
    }

    /// Says where its generation starts.
    pub async fn starts(&mut self, first_step: u64, source: v1::StateSource) {
        let request = v1::ReportStartRequest {
            worker_id: self.id,
            generation: self.generation,
            first_step,
            source: source.into(),
        };
        self.client.report_start(request).await.expect("the generation is alive");
    }

    /// Waits for its place, and starts at the newest checkpoint; that step.
    pub async fn begin(&mut self) -> u64 {
        let first = self.assigned().await;
        self.starts(first, v1::StateSource::Checkpoint).await;
        first
    }

    /// The next directive.
    pub async fn told(&mut self) -> Kind {
        let next = tokio::time::timeout(TEST_LIMIT, self.directives.message()).await;
        let directive = next.expect("a directive in time").expect("a sound line").expect("an open line");
        directive.kind.expect("a kind of this version")
    }

    /// The next directive that is not a lease.
    pub async fn ordered(&mut self) -> Kind {
        loop {
            match self.told().await {
                Kind::Lease(_) => {}
                other => return other,
            }
        }
    }

    /// Waits for its place; the step of the newest checkpoint.
    pub async fn assigned(&mut self) -> u64 {
        let Kind::Assignment(assignment) = self.told().await else { panic!("not an assignment") };
        self.generation = assignment.generation;
        self.world = assignment.world_size;
        assert_eq!(assignment.rank, self.rank);
        assert_eq!(assignment.peers.len(), (self.world as usize - 1).min(2), "the neighbours on the ring");
        assignment.checkpoint_step
    }

    pub fn report(&self, step: u64) -> v1::StepReport {
        let batch = self.plan.batch(Step(step));
        let positions = batch.of_rank(Rank(self.rank), self.world);
        v1::StepReport {
            generation: self.generation,
            step,
            epoch: batch.epoch,
            samples: vec![v1::SampleRange { begin: positions.start, end: positions.end }],
            loss_sum: 4.0 / (1.0 + step as f64),
            valid_count: 8.0,
            grad_norm: 1.0,
            times: Some(v1::StepTimes { total_ms: self.step_ms, ..Default::default() }),
            metrics: self.metrics.iter().map(Into::into).collect(),
            tokens: 10,
            cache_generation: self.cache_generation,
            ..Default::default()
        }
    }

    /// Follows again, as after a lost connection.
    pub async fn follow_again(&mut self, endpoint: &str) -> Result<(), Status> {
        let channel = Channel::from_shared(endpoint.to_owned()).expect("a valid address").connect_lazy();
        self.client = CoordinatorClient::new(channel);
        let follow = v1::FollowRequest { worker_id: self.id, incarnation: self.incarnation.clone() };
        self.directives = self.client.follow(follow).await?.into_inner();
        Ok(())
    }

    /// Reports steps; how many are committed.
    pub async fn steps(&mut self, steps: std::ops::Range<u64>) -> Result<u64, Status> {
        let steps = steps.map(|step| self.report(step)).collect();
        let request = v1::ReportStepsRequest { worker_id: self.id, steps };
        Ok(self.client.report_steps(request).await?.into_inner().committed_steps)
    }

    pub async fn beat(&mut self, phase: v1::WorkerPhase) -> bool {
        let request = v1::HeartbeatRequest {
            worker_id: self.id,
            incarnation: self.incarnation.clone(),
            generation: self.generation,
            phase: phase.into(),
            ..Default::default()
        };
        self.client.heartbeat(request).await.expect("a heartbeat is always answered").into_inner().known
    }

    pub async fn leave(&mut self, exit_code: i32) {
        let request = v1::LeaveRequest { worker_id: self.id, exit_code, reason: "done".into() };
        self.client.leave(request).await.expect("everyone may leave");
    }
}

/// Without a fault to spare.
pub fn fragile(mut options: Options) -> Options {
    options.budgets = Budgets { restarts: 0, ..Budgets::default() };
    options
}

/// Patience for tests that lose workers.
pub fn impatient() -> Patience {
    Patience {
        silence: Duration::from_millis(50),
        hang: Duration::from_secs(20),
        farewell: Duration::from_millis(500),
        ..Patience::default()
    }
}

/// A coordinator in the place of one that was killed; its journal may take a moment to be let go.
pub async fn successor(options: impl Fn() -> Options) -> Sandbox {
    let deadline = tokio::time::Instant::now() + TEST_LIMIT;
    loop {
        let mut options = options();
        options.restarted = true;
        let mut sandbox = Sandbox::start(options).await;
        match sandbox.serves().await {
            true => return sandbox,
            false => assert!(tokio::time::Instant::now() < deadline, "the journal is never let go"),
        }
    }
}
