//! Who is told what, and when.

use std::{sync::Arc, time::Duration};

use clap::Args;
use coxswain_proto::{
    human,
    run_spec::RunSpec,
    v1::{WatchEvent, watch_event::Kind},
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{hook::Hook, standstill::Standstill, trainjob::JobFollower};
use crate::{
    clock,
    control::Access,
    launch::{inputs::Env, rdzv_conf::LONGEST},
    render::status,
    supervise::{
        console::{Console, Terminal},
        watcher,
    },
};

/// Events that wait.
const EVENTS: usize = 64;
/// Faults that are told of one launch: a machine that fails again and again fills no channel.
const MOST_FAULTS: u32 = 20;

/// Flags that say who is told of a run.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Notification")]
pub struct NotifyFlags {
    /// Command or URL that receives a JSON message at each fault, at a standstill and at the end [env:
    /// COX_NOTIFY, key: launch.notify]
    #[arg(long, value_name = "COMMAND or URL")]
    pub notify: Option<String>,
    /// Report a standstill after this many seconds without a step
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=LONGEST.as_secs()))]
    pub notify_stall: u64,
}

/// What every message of a run says.
#[derive(Clone, Debug)]
struct MessageContext {
    run: String,
    output_dir: String,
}

impl MessageContext {
    fn message(&self, event: &str, text: &str) -> Value {
        let Self { run, output_dir } = self;
        let text = format!("{run}: {text}");
        // `text` is what chat programs show of a webhook.
        json!({"event": event, "run": run, "output_dir": output_dir, "text": text})
    }
}

/// What names who is told, the first one first: flags, environment, run file.
#[derive(Clone, Copy)]
pub struct HookSources<'a> {
    /// Flags of the command line.
    pub flags: &'a NotifyFlags,
    /// The environment.
    pub env: Env<'a>,
    /// The run.
    pub spec: &'a RunSpec,
}

/// Tells of a run until it is asked for its last word.
pub struct Notifier {
    hook: Option<HookFollower>,
    progress: Option<JobFollower>,
}

/// The user's hook, while it is told.
struct HookFollower {
    hook: Hook,
    about: MessageContext,
    terminal: Arc<Terminal>,
    follower: JoinHandle<()>,
}

impl Notifier {
    /// Begins, if anybody is to be told.
    pub fn start(sources: HookSources<'_>, access: &Access, terminal: &Arc<Terminal>) -> Option<Self> {
        let progress = JobFollower::start(sources.env, access, terminal);
        let hook = HookFollower::start(sources, access.clone(), terminal);
        (hook.is_some() || progress.is_some()).then_some(Self { hook, progress })
    }

    /// Tells how it ended, and waits a moment for who is told.
    pub async fn end(self, state: &str, exit_code: u8, text: &str) {
        let hook = async {
            if let Some(told) = self.hook {
                told.end(state, exit_code, text).await;
            }
        };
        let progress = async {
            if let Some(progress) = self.progress {
                progress.end(state == "finished").await;
            }
        };
        tokio::join!(hook, progress);
    }
}

impl HookFollower {
    fn start(sources: HookSources<'_>, access: Access, terminal: &Arc<Terminal>) -> Option<Self> {
        let HookSources { flags, env, spec } = sources;
        let hook = flags.notify.clone().or_else(|| env("COX_NOTIFY")).or_else(|| spec.launch.notify.clone());
        let hook = Hook::new(&hook.filter(|hook| !hook.is_empty())?);
        let about = MessageContext { run: spec.run.name.clone(), output_dir: spec.run.output_dir.clone() };
        let patience = Duration::from_secs(flags.notify_stall);
        let follower =
            RunFollower { hook: hook.clone(), about: about.clone(), terminal: Arc::clone(terminal) };
        let follower = tokio::spawn(follower.follow(access, patience));
        Some(Self { hook, about, terminal: Arc::clone(terminal), follower })
    }

    async fn end(self, state: &str, exit_code: u8, text: &str) {
        self.follower.abort();
        let mut message = self.about.message("end", text);
        message["state"] = json!(state);
        message["exit_code"] = json!(exit_code);
        hand_over(&self.hook, &self.terminal, message).await;
    }
}

struct RunFollower {
    hook: Hook,
    about: MessageContext,
    terminal: Arc<Terminal>,
}

impl RunFollower {
    /// One message at a time: what happens while a hook is busy waits, and is told after it.
    async fn follow(self, access: Access, patience: Duration) {
        let (told, mut events) = mpsc::channel(EVENTS);
        let _watcher = watcher::follow(access, told, Duration::MAX);
        let mut standstill = Standstill::new(patience, clock::now());
        let mut faults = 0;
        loop {
            let deadline = standstill.deadline();
            let due = async {
                match deadline {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            let message = tokio::select! {
                event = events.recv() => match event {
                    Some(event) => {
                        standstill.hear(clock::now(), &event);
                        faults += u32::from(matches!(event.kind, Some(Kind::Failure(_))));
                        self.of_fault(&event).filter(|_| faults <= MOST_FAULTS)
                    }
                    None => return,
                },
                () = due => standstill.due(clock::now()).map(|since| {
                    let text = format!("no step for {}; `cox status` says where each rank is", human::time(since));
                    self.about.message("stall", &text)
                }),
            };
            if let Some(message) = message {
                hand_over(&self.hook, &self.terminal, message).await;
            }
        }
    }

    fn of_fault(&self, event: &WatchEvent) -> Option<Value> {
        let Some(Kind::Failure(failure)) = &event.kind else { return None };
        Some(self.about.message("fault", &status::failure(failure)))
    }
}

async fn hand_over(hook: &Hook, terminal: &Terminal, message: Value) {
    let event = message["event"].as_str().unwrap_or_default().to_owned();
    if let Err(problem) = hook.tell(&event, &message).await {
        terminal.line(&format!("warning: --notify: {problem}"));
    }
}
