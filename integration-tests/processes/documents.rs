//! The commands that the README, the guide and the pages of operation show, run as a reader runs them: page
//! by page, in their order, in one directory. What cannot run here has a mark above its block, with the
//! reason: `<!-- not run: ... -->`.
//!
//! A run takes two steps here; other tests train the same run files. `my.yaml`, `runs/my` and the other names
//! that pages use for what is the reader's stand for the quickstart and small files of the repository.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use super::support::root;

/// Seconds; longer than a command here takes on a loaded machine.
const PATIENCE: &str = "300";

/// What is the reader's on a page, and what stands for it.
const STAND_INS: [(&str, &str); 2] =
    [("/data/my-robot", "my-robot"), ("/models/Qwen2.5-VL-3B-Instruct", "configs/assets/tiny-vla")];

/// Files that pages name, and which files of the repository stand for them.
const FILES: [(&str, &str); 4] = [
    ("chats.yaml", "configs/sft.yaml"),
    ("a.png", "configs/assets/shapes/images/blue-circle-0.png"),
    ("song.wav", "configs/assets/plucks/track-00/plucks.wav"),
    ("live/concert.wav", "configs/assets/plucks/track-01/drums.wav"),
];

/// The `cox` commands of a page's shell blocks that have no mark above them, each on one line, and those that
/// stand before what they print.
fn commands(page: &str) -> Vec<String> {
    let parts: Vec<_> = page.split("\n```sh\n").collect();
    let of_block = |pair: &[&str]| {
        let is_marked = pair[0].trim_end().lines().last().is_some_and(|it| it.starts_with("<!-- not run: "));
        let block = pair[1].split("\n```").next().filter(|_| !is_marked).unwrap_or_default();
        block
            .replace("\\\n", " ")
            .lines()
            .filter(|line| is_of_cox(line))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let with_output = page.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned);
    parts.windows(2).flat_map(of_block).chain(with_output).collect()
}

/// Whether the shell is to start `cox`, be it with variables before it or for the value of one.
fn is_of_cox(line: &str) -> bool {
    let first =
        line.split_whitespace().find(|word| *word != "export" && (!word.contains('=') || word.contains('(')));
    first.is_some_and(|word| word == "cox" || word.ends_with("$(cox"))
}

/// Runs a line of a page in `dir`, where `cox` is the one that is tested. What does not end by itself fails.
fn shell(dir: &Path, line: &str) -> Output {
    let cox = Path::new(env!("CARGO_BIN_EXE_cox")).parent().expect("a file has a folder").display();
    let path = format!("{cox}:{}", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("timeout");
    command.args([PATIENCE, "bash", "-ec", line]).current_dir(dir).stdin(Stdio::null()).env("PATH", path);
    command.env("XDG_CACHE_HOME", std::env::temp_dir().join("coxswain-tests"));
    command.output().expect("timeout and bash are there")
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
    let (mut tried, mut failed) = (0, Vec::new());
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        // A page that makes the reader's run file does so from nothing.
        let own = dir.path().join("my.yaml");
        let _ = fs::remove_file(&own);
        if !text.contains("--out my.yaml") {
            copy(&root().join("configs/quickstart.yaml"), &own);
        }
        for line in commands(&text) {
            tried += 1;
            let output = shell(dir.path(), &shortened(&line));
            if !output.status.success() {
                let told = [&output.stdout[..], &output.stderr].concat();
                failed.push(format!("{}: {line}\n{}", page.display(), String::from_utf8_lossy(&told)));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(tried > 40, "only {tried} commands were found");
}

#[test]
fn a_block_without_a_mark_is_read_and_one_with_a_mark_is_not() {
    let page = "\n```sh\ncargo build\ncox a \\\n  b\nX=1 cox c\nexport Y=$(cox d)\nkubectl get cox\n```\n\n\
                <!-- not run: no network -->\n```sh\ncox e\n```\n\n```text\n$ cox f\nprinted\n```\n";
    assert_eq!(commands(page), ["cox a    b", "X=1 cox c", "export Y=$(cox d)", "cox f"]);
}
