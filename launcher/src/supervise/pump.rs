//! Carries a child's output to its file and to the console.
//!
//! The file gets every byte as it is. The console gets whole lines with a prefix, so that ranks do not cut into each other's; a line
//! longer than `MAX_LINE` is cut into several.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::console::Console;

/// Longest piece of a line shown at once; a program that never ends its line must not fill our memory.
const MAX_LINE: usize = 64 << 10;

/// Where the lines of one stream are shown.
#[derive(Clone)]
pub struct Shown {
    /// The console.
    pub console: Arc<dyn Console>,
    /// Stands in front of each line.
    pub prefix: String,
}

/// Copies `from` to the end. A full disk ends the copy to the file, never the reading: a child must not block on its log.
pub async fn pump(mut from: impl AsyncRead + Unpin, mut file: Option<tokio::fs::File>, shown: Option<Shown>) {
    let mut buffer = vec![0; 8 << 10];
    let mut line = Vec::new();
    loop {
        let bytes = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(length) => &buffer[..length],
        };
        if let Some(log) = &mut file
            && let Err(error) = write(log, bytes).await
        {
            tracing::warn!(%error, "a log file cannot be written; its stream is not kept from here on");
            file = None;
        }
        if let Some(shown) = &shown {
            show(shown, &mut line, bytes);
        }
    }
    if let Some(shown) = shown.filter(|_| !line.is_empty()) {
        emit(&shown, &line);
    }
}

async fn write(log: &mut tokio::fs::File, bytes: &[u8]) -> std::io::Result<()> {
    log.write_all(bytes).await?;
    log.flush().await
}

fn show(shown: &Shown, line: &mut Vec<u8>, bytes: &[u8]) {
    for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
        line.extend_from_slice(piece);
        if piece.ends_with(b"\n") || line.len() >= MAX_LINE {
            emit(shown, line);
            line.clear();
        }
    }
}

fn emit(shown: &Shown, line: &[u8]) {
    let text = String::from_utf8_lossy(line);
    shown.console.line(&format!("{}{}", shown.prefix, text.trim_end_matches(['\n', '\r'])));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::console::Recorder;

    fn copy(input: &[u8]) -> (Vec<u8>, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let recorder = Arc::new(Recorder::default());
        let shown = Shown { console: recorder.clone(), prefix: "[rank0] ".into() };
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let file = tokio::fs::File::create(&path).await.unwrap();
            pump(input, Some(file), Some(shown)).await;
        });
        (std::fs::read(path).unwrap(), recorder.lines())
    }

    #[test]
    fn the_file_gets_the_bytes_and_the_console_whole_lines_with_a_prefix() {
        let (file, lines) = copy(b"one\ntwo \xff\r\nno end");
        assert_eq!(file, b"one\ntwo \xff\r\nno end");
        assert_eq!(lines, ["[rank0] one", "[rank0] two \u{fffd}", "[rank0] no end"]);
    }

    #[test]
    fn an_endless_line_is_cut() {
        let (file, lines) = copy(&vec![b'x'; MAX_LINE + 10_000]);
        assert_eq!(file.len(), MAX_LINE + 10_000);
        assert_eq!(lines.len(), 2);
    }
}
