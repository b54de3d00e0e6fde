//! The byte stream under a connection of the store: TCP, or a socket pair inside this process for a
//! `transport/`.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// One end of a connection.
#[derive(Debug)]
pub enum Wire {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A socket pair, with the other end in this process.
    #[cfg(unix)]
    Local(UnixStream),
}

/// Whether an error of `connect` says that this host can never reach such an address: it has no route to it, must not use it, or
/// lacks the address family.
pub(crate) fn is_unreachable(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NetworkUnreachable, PermissionDenied};
    lacks_family(error) || matches!(error.kind(), NetworkUnreachable | InvalidInput | PermissionDenied)
}

/// Whether an error says that this host lacks the address family, such as IPv6.
#[cfg(target_os = "linux")]
pub(crate) fn lacks_family(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

/// Whether an error says that this host lacks the address family: not known here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn lacks_family(_error: &io::Error) -> bool {
    false
}

macro_rules! of_the_stream {
    ($wire:expr, $stream:ident => $call:expr) => {
        match $wire {
            Wire::Tcp($stream) => $call,
            #[cfg(unix)]
            Wire::Local($stream) => $call,
        }
    };
}

impl Wire {
    /// Wraps a TCP stream and sets `TCP_NODELAY`, so that small messages are not delayed.
    pub fn tcp(stream: TcpStream) -> io::Result<Wire> {
        stream.set_nodelay(true)?;
        Ok(Wire::Tcp(stream))
    }

    /// Creates a connected pair within this process.
    #[cfg(unix)]
    pub fn pair() -> io::Result<(Wire, Wire)> {
        UnixStream::pair().map(|(one, other)| (Wire::Local(one), Wire::Local(other)))
    }

    /// Socket pairs are not supported here.
    #[cfg(not(unix))]
    pub fn pair() -> io::Result<(Wire, Wire)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn try_clone(&self) -> io::Result<Wire> {
        Ok(match self {
            Wire::Tcp(stream) => Wire::Tcp(stream.try_clone()?),
            #[cfg(unix)]
            Wire::Local(stream) => Wire::Local(stream.try_clone()?),
        })
    }

    pub fn set_nonblocking(&self, is_nonblocking: bool) -> io::Result<()> {
        of_the_stream!(self, stream => stream.set_nonblocking(is_nonblocking))
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        of_the_stream!(self, stream => stream.set_read_timeout(timeout))
    }

    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        of_the_stream!(self, stream => stream.set_write_timeout(timeout))
    }

    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        of_the_stream!(self, stream => stream.shutdown(how))
    }
}

impl Read for &Wire {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        of_the_stream!(self, stream => { let mut stream = stream; stream.read(bytes) })
    }
}

impl Write for &Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Tcp(stream) => {
                let mut stream = stream;
                stream.write(bytes)
            }
            #[cfg(unix)]
            Wire::Local(stream) => crate::os::write_socket(stream, bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(unix)]
impl std::os::fd::AsFd for Wire {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        of_the_stream!(self, stream => stream.as_fd())
    }
}
