//! Polling many sockets at once.

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(not(target_os = "linux"))]
pub(crate) use portable::*;

#[cfg(target_os = "linux")]
mod linux {
    use crate::os::Wire;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
    use std::io;
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    /// Ends a [`poll_sockets`] in another thread.
    pub(crate) struct Waker(OwnedFd);

    impl Waker {
        pub fn new() -> io::Result<Waker> {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            Ok(Waker(rustix::event::eventfd(0, flags)?))
        }

        pub fn wake(&self) {
            // It can only fail if it was woken 2^64 times and never cleared.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub fn clear(&self) {
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }
    }

    /// Lets a listener queue as many connections as ranks may come at once: the kernel drops the rest, which then try again after
    /// seconds. The standard library asks for 128.
    pub(crate) fn queue_more(listener: &TcpListener) -> io::Result<()> {
        const QUEUED: i32 = 4096;
        Ok(rustix::net::listen(listener, QUEUED)?)
    }

    /// Waits until a listener, the waker or one of the streams is ready, at most for `timeout`. A stream is
    /// ready when it can be read, has ended, or, where its `bool` says so, can be written. Answers which are.
    pub(crate) fn poll_sockets(
        listeners: &[TcpListener],
        waker: &Waker,
        streams: &[(&Wire, bool)],
        timeout: Option<Duration>,
    ) -> Vec<bool> {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(streams.len() + listeners.len() + 1);
        fds.extend(streams.iter().map(|(stream, write)| {
            PollFd::new(*stream, if *write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN })
        }));
        fds.push(PollFd::new(&waker.0, PollFlags::IN));
        fds.extend(listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        // Interrupted or refused: the caller polls again.
        let _ = rustix::event::poll(&mut fds, timeout.as_ref());
        fds[..streams.len()].iter().map(|fd| !fd.revents().is_empty()).collect()
    }
}

#[cfg(not(target_os = "linux"))]
mod portable {
    use crate::os::Wire;
    use std::io;
    use std::net::TcpListener;
    use std::time::Duration;

    /// Does nothing: waits on this system are short sleeps.
    pub(crate) struct Waker;

    impl Waker {
        pub fn new() -> io::Result<Waker> {
            Ok(Waker)
        }
        pub fn wake(&self) {}
        pub fn clear(&self) {}
    }

    /// Listeners have the system's queue here.
    pub(crate) fn queue_more(_listener: &TcpListener) -> io::Result<()> {
        Ok(())
    }

    /// Sleeps for a short time and reports every stream as ready; the sockets are non-blocking.
    pub(crate) fn poll_sockets(
        _listeners: &[TcpListener],
        _waker: &Waker,
        streams: &[(&Wire, bool)],
        timeout: Option<Duration>,
    ) -> Vec<bool> {
        let tick = Duration::from_millis(2);
        std::thread::sleep(timeout.unwrap_or(tick).min(tick));
        vec![true; streams.len()]
    }
}
