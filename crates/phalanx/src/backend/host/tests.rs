//! What happens at an instant that no trial of whole ranks can choose.

use super::*;
use crate::os::{Process, SharedFile};

/// Two ranks that take each other for processes.
fn pair() -> [HostComm; 2] {
    let processes = (0..2).map(|_| Process::current().unwrap()).collect();
    let world = Arc::new(World::processes("job", SharedFile::create().unwrap(), processes, 2).unwrap());
    let id = NewChannel::create(&world, 2).unwrap().id();
    [0, 1].map(|rank| {
        let channel = NewChannel::open(&world, id).unwrap();
        HostComm::attach(world.clone(), channel, rank, vec![0, 1], Duration::from_secs(60))
    })
}

#[test]
fn what_was_read_while_a_peer_gave_up_does_not_count() {
    let [reader, owner] = pair();
    assert!(reader.endpoint.inside(0, || ()).is_ok());
    assert!(reader.endpoint.inside(0, || owner.abort()).is_err());
}

#[test]
fn nothing_is_sent_behind_a_message_that_was_given_up() {
    let [sender, _receiver] = pair();
    // More than the ring holds.
    let message = vec![1u8; 1 << 20];
    let transfer = Transfer::host(Direction::Send(message.as_ptr()), 1, 0, DType::U8, message.len());
    // SAFETY: the message outlives the communicator.
    let [first, _second] = [0, 1].map(|_| unsafe { sender.post(transfer) }.unwrap());
    assert!(sender.progress().unwrap());
    sender.set_timeout(Duration::from_millis(1));
    assert!(sender.wait(first, &|| ()).unwrap_err().is_fatal());

    let mailbox = sender.endpoint.channel.mailbox(0, 1);
    let written = mailbox.sent_chunks.get();
    assert!(written > 0);
    mailbox.taken_chunks.set(written);
    sender.progress().unwrap();
    assert_eq!(mailbox.sent_chunks.get(), written);
}
