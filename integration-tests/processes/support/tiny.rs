//! A run small enough to be broken many times: the quickstart's model and data, a few ranks and small steps.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use serde_json::Value;

use super::{CoxProcess, cox};

/// What a run leaves that training decides.
const RESULTS: [&str; 3] = ["adapter/adapter_model.safetensors", "expert.safetensors", "sensor.safetensors"];

/// A run in a directory of its own.
pub struct Tiny {
    /// Removed with the test.
    dir: tempfile::TempDir,
    plan: Plan,
}

/// What decides what a run learns, besides its file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    steps: u64,
    checkpoint_every: u64,
    workers: u32,
}

impl Tiny {
    /// A run of so many steps with a checkpoint every so many.
    pub fn new(steps: u64, checkpoint_every: u64) -> Self {
        Self::of(Plan { steps, checkpoint_every, workers: 2 })
    }

    /// A run of so many steps without checkpoints but the last one; its launchers are to start so many
    /// workers together.
    pub fn of_workers(workers: u32, steps: u64) -> Self {
        Self::of(Plan { steps, checkpoint_every: 0, workers })
    }

    fn of(plan: Plan) -> Self {
        Self { dir: tempfile::tempdir().expect("a directory"), plan }
    }

    /// The run's output directory.
    pub fn output(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// A command about it that names its address, with its token.
    pub fn asking(&self, words: &[&str]) -> Command {
        let mut command = cox(words);
        command.env("COX_TOKEN_FILE", self.output().join("logs/token"));
        command
    }

    /// Where the run's workers look whether to stand still.
    pub fn hold_dir(&self) -> PathBuf {
        self.dir.path().join("hold")
    }

    /// Makes a worker of the next launch stand still in `phase` from `step` on.
    pub fn hold(&self, rank: u32, phase: &str, step: u64) -> HoldFile {
        HoldFile::order(&self.hold_dir(), rank, phase, step)
    }

    /// `cox run` of it.
    pub fn command(&self, flags: &[&str]) -> Command {
        self.command_of("configs/quickstart.yaml", flags)
    }

    /// `cox run` of it with another file that says the same.
    pub fn command_of(&self, config: &str, flags: &[&str]) -> Command {
        self.word("run", config, flags)
    }

    /// `cox check` of it.
    pub fn check(&self) -> Command {
        self.word("check", "configs/quickstart.yaml", &[])
    }

    fn word(&self, word: &str, config: &str, flags: &[&str]) -> Command {
        let output_dir = format!("run.output_dir={}", self.output().display());
        let (steps, every) = (
            format!("train.steps={}", self.plan.steps),
            format!("train.checkpoint_every={}", self.plan.checkpoint_every),
        );
        let mut arguments = vec![word, config, &output_dir, &steps, &every];
        arguments.extend(["train.global_batch=4", "eval.samples=2", "optimizer.warmup_steps=2"]);
        arguments.extend(flags);
        let mut command = cox(&arguments);
        command.env("COX_TEST_HOLD", self.hold_dir());
        command
    }

    /// Starts it.
    pub fn start(&self, flags: &[&str]) -> CoxProcess {
        CoxProcess::of(self.command(flags))
    }

    /// Waits for the end and holds the results against those of the same run undisturbed, bit for bit, and
    /// the records against the plan. Returns the audit.
    pub fn assert_undisturbed(&self, running: CoxProcess, what: &str) -> Value {
        let (status, printed) = running.finish();
        assert!(status.success(), "{what}: {status}\n{printed}");
        let results = results(&self.output());
        let undisturbed = undisturbed(self.plan);
        for (name, (ours, theirs)) in RESULTS.iter().zip(results.iter().zip(&undisturbed)) {
            assert!(ours == theirs, "{what}: {name} is not the undisturbed run's\n{printed}");
        }
        let audit = audit(&self.output());
        assert_eq!(audit["missing"], 0, "{what}: {audit:#}\n{printed}");
        assert_eq!(audit["duplicate"], 0, "{what}: {audit:#}\n{printed}");
        assert_eq!(audit["committed_steps"], self.plan.steps, "{what}: {audit:#}\n{printed}");
        audit
    }
}

/// Where a worker stands still.
pub struct HoldFile(PathBuf);

impl HoldFile {
    /// Makes a worker that is launched with this directory as `COX_TEST_HOLD` stand still in `phase` from
    /// `step` on.
    pub fn order(directory: &Path, rank: u32, phase: &str, step: u64) -> Self {
        std::fs::create_dir_all(directory).expect("a directory");
        let order = directory.join(format!("{rank}-{phase}"));
        std::fs::write(&order, step.to_string()).expect("a file");
        Self(order.with_file_name(format!("{rank}-{phase}.held")))
    }

    /// Waits until it does.
    pub fn wait(&self, running: &mut CoxProcess) {
        super::processes::wait_for(&self.0.display().to_string(), || {
            running.assert_alive();
            self.0.exists().then_some(())
        });
    }

    /// Lets it go on.
    pub fn release(self) {
        std::fs::remove_file(&self.0).expect("it is held");
    }
}

/// `cox audit --json` of a run; its exit code must agree with what it says, and its ranks with the ledger.
pub fn audit(output: &Path) -> Value {
    let (mut command, witness) = (cox(&["audit", "--json"]), output.join("witness"));
    command.arg(output);
    // Before the first step there is none, nor where a run's disk is lost with its machine.
    if witness.exists() {
        command.arg("--against").arg(&witness);
    }
    let answer = command.output().expect("cox was built");
    let audit: Value = serde_json::from_slice(&answer.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&answer.stderr)));
    let clean = audit["missing"] == 0 && audit["duplicate"] == 0;
    assert!(!witness.exists() || audit["against"]["differing"] == 0, "{audit:#}");
    assert_eq!(answer.status.code(), Some(if clean { 0 } else { 9 }), "{audit:#}");
    audit
}

/// What a run has learned.
pub fn results(output: &Path) -> Vec<Vec<u8>> {
    let read =
        |name: &&str| std::fs::read(output.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    RESULTS.iter().map(read).collect()
}

/// Contents of the files that a run leaves.
type Results = Vec<Vec<u8>>;

/// Results of the run without faults, of one launcher; trained once for all tests of this process.
fn undisturbed(plan: Plan) -> Results {
    static TRAINED: Mutex<Option<HashMap<Plan, Results>>> = Mutex::new(None);
    // A test that failed while it trained leaves nothing half done.
    let mut trained = TRAINED.lock().unwrap_or_else(PoisonError::into_inner);
    let trained = trained.get_or_insert_default();
    let train = || {
        let tiny = Tiny::of(plan);
        let (status, printed) = tiny.start(&[&format!("--nproc-per-node={}", plan.workers)]).finish();
        assert!(status.success(), "{printed}");
        results(&tiny.output())
    };
    trained.entry(plan).or_insert_with(train).clone()
}
