//! Error streams that take nothing.
//!
//! A thread that ends a hanging job says why first. It must come to the end whatever becomes of what it says.

/// What becomes of what is written to standard error: it is refused, closed, without a reader, or with one that does not read.
pub const STREAMS: [&str; 4] = ["full", "closed", "no_reader", "not_read"];

/// Replaces this process's error stream. What is returned keeps the stream as it is.
#[cfg(target_os = "linux")]
pub fn replace(with: &str) -> Result<Option<std::io::PipeReader>, String> {
    use rustix::stdio::dup2_stderr;
    let text = |error: std::io::Error| error.to_string();
    match with {
        "full" => {
            let full = std::fs::OpenOptions::new().write(true).open("/dev/full").map_err(text)?;
            dup2_stderr(full).map_err(|error| error.to_string())?;
        }
        "closed" => {
            // SAFETY: nothing of this process owns the descriptor of its error stream.
            unsafe { libc::close(2) };
        }
        "no_reader" => {
            let (reader, writer) = std::io::pipe().map_err(text)?;
            dup2_stderr(writer).map_err(|error| error.to_string())?;
            drop(reader);
        }
        _ => {
            use std::io::Write;
            let (reader, mut writer) = std::io::pipe().map_err(text)?;
            rustix::io::ioctl_fionbio(&writer, true).map_err(|error| error.to_string())?;
            while writer.write(&[b'.'; 4096]).is_ok() {}
            rustix::io::ioctl_fionbio(&writer, false).map_err(|error| error.to_string())?;
            dup2_stderr(writer).map_err(|error| error.to_string())?;
            return Ok(Some(reader));
        }
    }
    Ok(None)
}

#[cfg(not(target_os = "linux"))]
pub fn replace(_with: &str) -> Result<Option<std::io::PipeReader>, String> {
    Err("for Linux".into())
}
