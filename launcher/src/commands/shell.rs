//! `cox completions` and `cox man`: what a shell and `man` know of this program, made from its own flags.

use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::{
    exit::{CliError, Outcome},
    render::say,
};

/// Flags of `cox completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Flags of `cox man`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Directory for the pages, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes a script that completes the commands and flags of `program`.
pub fn completions(args: &CompletionsArgs, program: Command) -> Outcome {
    say(script(args.shell, program).trim_end());
    Ok(())
}

/// The completion script of a shell.
pub fn script(shell: Shell, mut program: Command) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut program, "cox", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a page for each command of `program`.
pub fn man(args: &ManArgs, program: Command) -> Outcome {
    pages(&args.dir, program).map_err(|error| CliError::usage(format!("{}: {error}", args.dir.display())))
}

/// Writes the pages.
pub fn pages(dir: &Path, program: Command) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(program, dir)
}
