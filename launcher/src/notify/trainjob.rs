//! The progress of a Kubeflow TrainJob: `kubectl` shows how far a run is, what is left, its loss.
//!
//! Where Kubeflow Trainer (2.2 and later, feature gate `TrainJobStatus`) wants it, it names in each pod a
//! server, the file of its certificate authority and the file of a token, which changes now and then. What it
//! gets is what its page "TrainJob Progress and Training Metrics" documents, from the launcher with the
//! coordinator alone, at most every five seconds. A server that does not take it is a line; training does not
//! wait.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use coxswain_proto::v1::{StepCommitted, WatchEvent, watch_event::Kind};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};

use super::post::Post;
use crate::{
    clock,
    control::Access,
    launch::inputs::Env,
    supervise::{
        console::{Console, Terminal},
        watcher,
    },
};

/// Between two messages: what its documentation asks for.
const PAUSE: Duration = Duration::from_secs(5);
/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(6);
/// Events that wait.
const EVENTS: usize = 64;
/// Largest token that is read.
const MAX_TOKEN_BYTES: usize = 64 << 10;

/// Follows a run and tells its TrainJob.
pub struct JobFollower {
    end: oneshot::Sender<bool>,
    follower: JoinHandle<()>,
}

impl JobFollower {
    /// Begins, if the environment is that of a TrainJob whose progress is wanted.
    pub fn start(env: Env<'_>, access: &Access, terminal: &Arc<Terminal>) -> Option<Self> {
        let server = match Server::from_env(env)? {
            Ok(server) => server,
            Err(problem) => {
                terminal.line(&format!("warning: cannot report the TrainJob's progress: {problem}"));
                return None;
            }
        };
        let (end, ended) = oneshot::channel();
        let teller = Teller {
            server,
            terminal: Arc::clone(terminal),
            known: JobProgress::default(),
            is_refused: false,
        };
        Some(Self { end, follower: tokio::spawn(teller.follow(access.clone(), ended)) })
    }

    /// Tells the last of it, and waits a moment for that.
    pub async fn end(self, is_finished: bool) {
        // A follower that is gone has nothing to tell.
        let _ = self.end.send(is_finished);
        // One message may be under way, and the last one follows it.
        let _ = timeout(2 * PATIENCE, self.follower).await;
    }
}

/// Where a TrainJob's progress goes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Server {
    url: String,
    ca_cert: Option<PathBuf>,
    token: PathBuf,
}

impl Server {
    /// As Kubeflow's controller names it in each pod; nothing where it does not.
    fn from_env(env: Env<'_>) -> Option<Result<Self, String>> {
        let url = env("KUBEFLOW_TRAINER_SERVER_URL")?;
        let ca_cert = env("KUBEFLOW_TRAINER_SERVER_CA_CERT").map(PathBuf::from);
        let Some(token) = env("KUBEFLOW_TRAINER_SERVER_TOKEN").map(PathBuf::from) else {
            let problem = "KUBEFLOW_TRAINER_SERVER_URL is set, but KUBEFLOW_TRAINER_SERVER_TOKEN is not";
            return Some(Err(problem.to_owned()));
        };
        Some(Ok(Self { url, ca_cert, token }))
    }

    async fn post(&self, message: &Value) -> Result<(), String> {
        // Read anew: it changes while a run goes on.
        let unreadable = |why: String| format!("{}: {why}", self.token.display());
        let token = fs::read(&self.token).map_err(|error| unreadable(error.to_string()))?;
        let token = String::from_utf8(token).ok().filter(|token| token.len() <= MAX_TOKEN_BYTES);
        let token = token.ok_or_else(|| unreadable("no token".to_owned()))?;
        let headers = [format!("Authorization: Bearer {}", token.trim())];
        let post = Post { url: &self.url, headers: &headers, ca_cert: self.ca_cert.as_deref(), message };
        post.send(PATIENCE).await
    }
}

/// What is known of the run.
#[derive(Clone, Debug, Default, PartialEq)]
struct JobProgress {
    committed: u64,
    total: u64,
    /// The newest step that has learned.
    step: Option<StepCommitted>,
    /// The newest errors on held-out samples.
    held_out: Vec<(String, f64)>,
}

impl JobProgress {
    fn add_event(&mut self, event: &WatchEvent) {
        let metrics = match &event.kind {
            Some(Kind::Status(status)) => {
                (self.committed, self.total) = (status.committed_steps, status.total_steps);
                &status.held_out
            }
            Some(Kind::Step(step)) => {
                (self.committed, self.total) = (step.step + 1, step.total_steps);
                if step.skipped.is_none() {
                    self.step = Some(step.clone());
                }
                &step.metrics
            }
            _ => return,
        };
        let named =
            metrics.iter().filter_map(|metric| Some((metric.name.strip_prefix("eval/")?, metric.value)));
        let measures: Vec<_> = named
            .filter(|(name, _)| !name.contains('/'))
            .map(|(name, value)| (format!("eval_{name}"), value))
            .collect();
        if !measures.is_empty() {
            self.held_out = measures;
        }
    }

    /// The message about it. Only a run that is finished is at 100 %.
    fn message(&self, is_finished: bool, now: jiff::Timestamp) -> Value {
        let share = (100 * self.committed.min(self.total)).checked_div(self.total).unwrap_or(0);
        let left = self.total.saturating_sub(self.committed) as f64;
        let pace = self.step.as_ref().and_then(|step| step.times.as_ref()).map(|times| times.total_ms / 1e3);
        let seconds = pace.map(|pace| (left * pace).round().clamp(0.0, f64::from(i32::MAX)) as i32);
        let of_step = self.step.iter().flat_map(|step| {
            let named = [
                ("loss", step.loss),
                ("grad_norm", step.grad_norm),
                ("learning_rate", step.learning_rate),
                ("samples_per_second", step.samples_per_second),
                ("epoch", step.epoch as f64),
            ];
            named.map(|(name, value)| (name.to_owned(), value))
        });
        let counts = [("step", self.committed), ("total_steps", self.total)];
        let counts = counts.into_iter().filter(|(_, count)| *count > 0);
        let counts = counts.map(|(name, count)| (name.to_owned(), count as f64));
        let metrics = of_step.chain(self.held_out.iter().cloned()).chain(counts);
        let metrics: Vec<_> =
            metrics.map(|(name, value)| json!({"name": name, "value": value.to_string()})).collect();
        json!({"trainerStatus": {
            "progressPercentage": if is_finished { 100 } else { share.min(99) },
            "estimatedRemainingSeconds": if is_finished { Some(0) } else { seconds },
            "metrics": metrics,
            "lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        }})
    }
}

struct Teller {
    server: Server,
    terminal: Arc<Terminal>,
    known: JobProgress,
    is_refused: bool,
}

impl Teller {
    async fn follow(mut self, access: Access, mut ended: oneshot::Receiver<bool>) {
        let (told, mut events) = mpsc::channel(EVENTS);
        let _watcher = watcher::follow(access, told, Duration::MAX);
        let mut due = interval(PAUSE);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sent = JobProgress::default();
        loop {
            tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(event) => self.known.add_event(&event),
                    None => return,
                },
                _ = due.tick() => if self.known != sent {
                    sent = self.known.clone();
                    self.tell(false).await;
                },
                end = &mut ended => {
                    let is_finished = end.unwrap_or_default();
                    if is_finished || self.known != sent {
                        self.tell(is_finished).await;
                    }
                    return;
                }
            }
        }
    }

    async fn tell(&mut self, is_finished: bool) {
        let now = jiff::Timestamp::try_from(clock::system()).unwrap_or_default();
        let message = self.known.message(is_finished, now);
        match (self.server.post(&message).await, self.is_refused) {
            (Ok(()), _) => self.is_refused = false,
            (Err(problem), false) => {
                self.is_refused = true;
                self.terminal.line(&format!("warning: cannot report the TrainJob's progress: {problem}"));
            }
            (Err(_), true) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{GetStatusResponse, Metric, StepTimes};

    use super::*;

    fn event(kind: Kind) -> WatchEvent {
        WatchEvent { unix_ms: 0, kind: Some(kind) }
    }

    #[test]
    fn progress_is_what_the_controller_documents() {
        let mut known = JobProgress::default();
        known.add_event(&event(Kind::Status(GetStatusResponse { total_steps: 400, ..Default::default() })));
        let eval = Metric { name: "eval/squared".into(), value: 0.25, ..Metric::default() };
        let part = Metric { name: "eval/squared/dim3".into(), value: 9.0, ..Metric::default() };
        let times = Some(StepTimes { total_ms: 500.0, ..StepTimes::default() });
        let step = StepCommitted {
            step: 98,
            total_steps: 400,
            loss: 0.5,
            learning_rate: 1e-4,
            metrics: vec![eval, part],
            times,
            ..Default::default()
        };
        known.add_event(&event(Kind::Step(step)));
        let at = jiff::Timestamp::from_second(1_795_301_998).unwrap();
        let told = known.message(false, at);
        let status = &told["trainerStatus"];
        assert_eq!(status["progressPercentage"], 24);
        assert_eq!(status["estimatedRemainingSeconds"], 151, "301 steps of half a second");
        assert_eq!(status["lastUpdatedTime"], "2026-11-21T22:59:58Z");
        let metric = |name: &str| {
            let all = status["metrics"].as_array().unwrap();
            all.iter().find(|of| of["name"] == name).map(|of| of["value"].as_str().unwrap().to_owned())
        };
        let found = ["loss", "learning_rate", "eval_squared", "step"].map(|name| metric(name).unwrap());
        assert_eq!(found, ["0.5", "0.0001", "0.25", "99"]);
        assert_eq!(metric("eval_squared/dim3"), None);
        assert_eq!(known.message(true, at)["trainerStatus"]["progressPercentage"], 100);
        let nothing = JobProgress::default().message(false, at);
        assert_eq!(nothing["trainerStatus"]["estimatedRemainingSeconds"], Value::Null);
    }

    #[test]
    fn all_steps_of_a_run_that_is_not_finished_are_99_percent() {
        let known = JobProgress { committed: 400, total: 400, ..JobProgress::default() };
        let told = known.message(false, jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(told["trainerStatus"]["progressPercentage"], 99);
    }

    #[test]
    fn a_server_is_named_by_three_variables() {
        let found = |given: &'static [(&str, &str)]| {
            Server::from_env(&|name| {
                given.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(found(&[]), None);
        let lacks = found(&[("KUBEFLOW_TRAINER_SERVER_URL", "https://a")]).unwrap().unwrap_err();
        assert!(lacks.contains("KUBEFLOW_TRAINER_SERVER_TOKEN is not"), "{lacks}");
        let server = found(&[
            ("KUBEFLOW_TRAINER_SERVER_URL", "https://a"),
            ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "/ca.crt"),
            ("KUBEFLOW_TRAINER_SERVER_TOKEN", "/token"),
        ]);
        assert_eq!(
            server.unwrap().unwrap(),
            Server { url: "https://a".into(), ca_cert: Some("/ca.crt".into()), token: "/token".into() }
        );
    }
}
