//! `cox completions` and `cox man`: what a shell and `man` know of this program, made from its own flags.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::Cli;
use crate::{
    exit::{Failed, Outcome},
    render::say,
};

/// Flags of `cox completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Flags of `cox man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Directory of the pages, for instance ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes a script that completes this program's commands and flags.
pub fn completions(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "cox", &mut script);
    say(String::from_utf8_lossy(&script).trim_end());
    Ok(())
}

/// Writes a page for each command.
pub fn man(args: &ManArgs) -> Outcome {
    std::fs::create_dir_all(&args.dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), &args.dir))
        .map_err(|error| Failed::usage(format!("{}: {error}", args.dir.display())))
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_shell_learns_every_command() {
        let named = ["simulate", "rebuild-cache", "completions"];
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "cox", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(named.iter().all(|command| script.contains(command)), "{shell}");
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(&ManArgs { dir: dir.path().join("man1") }).unwrap();
        for page in ["cox.1", "cox-run.1", "cox-cache-verify.1"] {
            let text = std::fs::read_to_string(dir.path().join("man1").join(page)).unwrap();
            assert!(text.contains(".SH NAME"), "{page}");
        }
    }
}
