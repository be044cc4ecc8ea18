"""What nobody would write, fed to everything that reads: fixed bad inputs made from the golden files, and a fuzzer.

The rule: a value whose canonical bytes are the ones that were read, or an error of `tieredckpt.errors`. Never another exception,
a hang, memory for what is only claimed, a touch outside of the root, or a deletion.
"""
