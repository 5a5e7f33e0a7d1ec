//! The commands that the README, the guide and the pages of operation show, run as a reader runs them: page
//! by page, in their order, in one directory. Each line of a shell block runs, unless the block has a mark
//! above it (`<!-- not run: REASON -->`) or the line begins like one of [`ELSEWHERE`]. Those below the mark
//! `<!-- beside a run -->` have a run to ask.
//!
//! A run takes two steps here; other tests train the same run files. `my.yaml`, `runs/my` and the other names
//! that pages use for what is the reader's stand for the quickstart and small files of the repository.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use nix::sys::signal::Signal;

use super::support::{CoxProcess, processes::signal, root};

/// Seconds; longer than a command here takes on a loaded machine.
const PATIENCE: &str = "300";

/// What is the reader's on a page, and what stands for it.
const STAND_INS: [(&str, &str); 4] = [
    ("/data/my-robot", "my-robot"),
    ("/models/Qwen2.5-VL-3B-Instruct", "configs/assets/tiny-vla"),
    ("0.0.0.0:8000", "0.0.0.0:0"),
    ("[observation/image, observation/wrist_image]", "[observation/image]"),
];

/// How lines begin that do not run here, and why.
const ELSEWHERE: [(&str, &str); 19] = [
    ("cargo ", "builds what this test was built with"),
    ("maturin ", "builds a wheel"),
    ("pip install ", "installs from PyPI"),
    ("apt-get ", "installs for the whole machine"),
    ("cp target/", "installs for the whole machine"),
    ("export PATH=", "the test has its own `cox` there"),
    ("python3 -m venv sim", "the simulator is of no use without its packages"),
    ("sim/bin/pip ", "installs from PyPI"),
    ("sim/bin/python ", "needs the simulator"),
    ("python -c 'import coxswain_policy", "needs LeRobot"),
    ("lerobot-eval ", "needs LeRobot"),
    ("sbatch ", "needs Slurm"),
    ("kubectl ", "needs a cluster"),
    ("grpcurl ", "needs the program"),
    ("curl ", "names no address; another test asks for the metrics"),
    ("tensorboard ", "answers until it is stopped; another test reads its files"),
    ("TOKEN=$(cat ", "a variable for lines that do not run"),
    ("cox top ", "needs a terminal"),
    ("cox drain ", "needs a world of several nodes"),
];

/// Files that pages name, and which files of the repository stand for them.
const FILES: [(&str, &str); 4] = [
    ("chats.yaml", "configs/sft.yaml"),
    ("a.png", "configs/assets/shapes/images/blue-circle-0.png"),
    ("song.wav", "configs/assets/plucks/track-00/plucks.wav"),
    ("live/concert.wav", "configs/assets/plucks/track-01/drums.wav"),
];

/// Lines that a reader types one after the other.
#[derive(Debug, Default, PartialEq)]
struct Block {
    lines: Vec<String>,
    /// Whether a run is to be there meanwhile.
    beside_run: bool,
}

/// A page's shell blocks that have no mark above them, and the commands that stand before what they print.
fn blocks(page: &str) -> Vec<Block> {
    let parts: Vec<_> = page.split("\n```sh\n").collect();
    let of_block = |pair: &[&str]| {
        let mark = pair[0].trim_end().lines().last().unwrap_or_default();
        let block = pair[1].split("\n```").next().filter(|_| !mark.starts_with("<!-- not run: "))?;
        let block = block.replace("\\\n", " ");
        let lines = block.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let beside_run = mark == "<!-- beside a run -->";
        Some(Block { lines: lines.map(str::to_owned).collect(), beside_run })
    };
    let printed = page.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned);
    let printed = Block { lines: printed.collect(), beside_run: false };
    parts.windows(2).filter_map(of_block).chain([printed]).collect()
}

/// The place in [`ELSEWHERE`] that a line has.
fn elsewhere(line: &str) -> Option<&'static str> {
    ELSEWHERE.iter().map(|(begin, _)| *begin).find(|begin| line.starts_with(begin))
}

/// A line that `program` starts a shell for, in `dir`, where `cox` is the one that is tested.
fn typed(program: &[&str], dir: &Path, line: &str) -> Command {
    let cox = Path::new(env!("CARGO_BIN_EXE_cox")).parent().expect("a file has a folder").display();
    let path = format!("{cox}:{}", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).args(["-ec", line]).current_dir(dir).stdin(Stdio::null()).env("PATH", path);
    command.env("XDG_CACHE_HOME", std::env::temp_dir().join("coxswain-tests"));
    command
}

/// Runs a line of a page. What does not end by itself fails.
fn shell(dir: &Path, line: &str) -> Output {
    typed(&["timeout", PATIENCE, "bash"], dir, line).output().expect("timeout and bash are there")
}

/// Starts a line of a page that does not end by itself.
fn started(dir: &Path, line: &str) -> CoxProcess {
    CoxProcess::of(typed(&["bash"], dir, &format!("exec {line}")))
}

/// What a policy's server printed, if it did not serve until it was interrupted.
fn fault_of_server(dir: &Path, line: &str) -> Option<String> {
    let place = if line.contains("--listen") { "" } else { " --listen 127.0.0.1:0" };
    let mut server = started(dir, &format!("{line}{place}"));
    server.wait_for("serving at ws");
    signal(server.pid() as i32, Signal::SIGINT);
    let (status, printed) = server.finish();
    (!status.success() && status.code() != Some(130)).then_some(printed)
}

/// What a line of a page printed, if it failed.
fn fault_of(dir: &Path, line: &str) -> Option<String> {
    if line.starts_with("cox serve ") {
        return fault_of_server(dir, line);
    }
    let output = shell(dir, line);
    let told = [&output.stdout[..], &output.stderr].concat();
    (!output.status.success()).then(|| String::from_utf8_lossy(&told).into_owned())
}

/// The lines that failed of a block, with what they printed. What follows a run ends with it.
fn faults_of(dir: &Path, block: &Block) -> Vec<String> {
    let run =
        "cox run configs/quickstart-cached.yaml run.output_dir=runs/beside train.steps=1000000 train.epochs=";
    let mut running = block.beside_run.then(|| started(dir, run));
    running.iter_mut().for_each(|run| drop(run.wait_for("training: steps are being committed")));
    let lines = block.lines.iter().filter(|line| elsewhere(line).is_none());
    let (following, others): (Vec<_>, Vec<_>) = lines.partition(|line| line.starts_with("cox watch "));
    let following: Vec<_> =
        following.into_iter().map(|line| (line, started(dir, &shortened(line)))).collect();
    let told = |(line, printed): (&String, String)| format!("{line}\n{printed}");
    let faults = others.into_iter().filter_map(|line| Some((line, fault_of(dir, &shortened(line))?)));
    let mut faults: Vec<_> = faults.map(told).collect();
    if let Some(running) = running {
        if !block.lines.iter().any(|line| line.starts_with("cox stop")) {
            faults.extend(fault_of(dir, "cox stop"));
        }
        let (status, printed) = running.finish();
        faults.extend((!status.success()).then(|| format!("{run}\n{printed}")));
    }
    for (line, follower) in following {
        let (status, printed) = follower.finish();
        faults.extend((!status.success()).then(|| told((line, printed))));
    }
    faults
}

/// The line as it runs here.
fn shortened(line: &str) -> String {
    let line = line.split(" #").next().unwrap_or_default();
    let line = STAND_INS.iter().fold(line.to_owned(), |line, (name, stand_in)| line.replace(name, stand_in));
    if line.starts_with("cox run ") { format!("{line} train.steps=2 train.epochs=") } else { line }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).expect("a folder");
        for entry in fs::read_dir(from).expect("a folder of the repository").flatten() {
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::create_dir_all(to.parent().expect("a file has a folder")).expect("a folder");
        fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

/// A directory with what the pages take for granted.
fn prepared(dir: &Path) {
    symlink(root().join("configs"), dir.join("configs")).expect("a link");
    copy(&root().join("configs/assets/metaworld-mini"), &dir.join("my-robot"));
    FILES.iter().for_each(|(name, stand_in)| copy(&root().join(stand_in), &dir.join(name)));
    fs::write(
        dir.join("questions.jsonl"),
        "{\"prompt\": \"Which colour is it?\", \"images\": [\"a.png\"]}\n",
    )
    .expect("a file");
    for run in ["my", "a", "b"] {
        let line = format!("cox run configs/quickstart.yaml run.output_dir=runs/{run} train.steps=2");
        let output = shell(dir, &line);
        assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The README, and all pages of the guide and of operation.
fn pages() -> Vec<PathBuf> {
    let folders =
        ["docs/guide", "docs/operate"].map(|folder| fs::read_dir(root().join(folder)).expect("a folder"));
    let files = folders.into_iter().flatten().flatten().map(|entry| entry.path());
    let mut pages: Vec<_> = files.filter(|path| path.extension().is_some_and(|it| it == "md")).collect();
    pages.sort();
    pages.push(root().join("README.md"));
    pages
}

#[test]
fn every_command_of_the_guide_and_of_operation_runs_or_says_why_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path());
    let (mut tried, mut failed, mut needed) = (0, Vec::new(), BTreeSet::new());
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        // A page that makes the reader's run file does so from nothing.
        let own = dir.path().join("my.yaml");
        let _ = fs::remove_file(&own);
        if !text.contains("--out my.yaml") {
            copy(&root().join("configs/quickstart.yaml"), &own);
        }
        for block in blocks(&text) {
            let not_here: Vec<_> = block.lines.iter().filter_map(|line| elsewhere(line)).collect();
            tried += block.lines.len() - not_here.len();
            needed.extend(not_here);
            let faults = faults_of(dir.path(), &block).into_iter();
            failed.extend(faults.map(|fault| format!("{}: {fault}", page.display())));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(tried > 80, "only {tried} commands were found");
    let unused: Vec<_> = ELSEWHERE.iter().filter(|(begin, _)| !needed.contains(begin)).collect();
    assert!(unused.is_empty(), "no page has lines that begin so: {unused:?}");
}

#[test]
fn every_line_of_a_block_without_a_mark_is_read_and_none_of_one_with_a_mark() {
    let page = "\n```sh\ncargo build\ncox a \\\n  b\n# a remark\nX=1 cox c\nls\n```\n\n\
                <!-- not run: no network -->\n```sh\ncox e\n```\n\n\
                <!-- beside a run -->\n```sh\ncox g\n```\n\n```text\n$ cox f\nprinted\n```\n";
    let read = blocks(page);
    let lines: Vec<_> = read.iter().map(|block| (block.lines.join("|"), block.beside_run)).collect();
    let expected = [("cargo build|cox a    b|X=1 cox c|ls", false), ("cox g", true), ("cox f", false)];
    assert_eq!(lines, expected.map(|(lines, beside)| (lines.to_owned(), beside)));
    let here: Vec<_> = read[0].lines.iter().filter(|line| elsewhere(line).is_none()).collect();
    assert_eq!(here, ["cox a    b", "X=1 cox c", "ls"]);
}
